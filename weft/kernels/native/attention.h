// Attention in training, and its gradients: a head of a row at a time, so that all that it needs stays near.
//
// What is read and written is [B, heads, length, dim] with numbers that may stand apart, in float or bf16; all sums are
// in float. Where the CPU multiplies bf16, so are bf16 vectors: weights and slopes are then rounded before they are
// multiplied, as the vectors were.
#pragma once

#include <type_traits>
#include <utility>

#include "decisions.h"
#include "memory.h"
#include "products.h"
#include "tiles.h"

namespace weft {

// Where the vectors of a tensor [B, heads, length, dim] stand: how many numbers a row, a head and a token are apart.
struct Heads {
  void* at;
  int64_t row, head, token;
};

// Queries see keys before lengths[b], if there are lengths, and if causal none behind their own place. Weights are
// dropped as kernels/dropout.py decides with this key: what is below the bound is kept and becomes `kept` times as much;
// nothing is dropped if that is 0.
struct Attention {
  int64_t rows, heads, groups, queries, keys, dim;
  int32_t causal, narrow, bound;
  float scale, kept;
  uint64_t key;
  const int64_t* lengths;
  Heads q, k, v, out;        // out: what was attended to, or its gradient
  Heads dq, dk, dv;          // of the backward pass
};

namespace attention {

constexpr int QUERIES = 32;  // so many at a time

// Rows of a tile that is V vectors wide: as many as there are registers for, and work enough to wait for no sum.
template <int V>
constexpr int HIGH = LANES == 16 ? (V == 4 ? 6 : 8) : (V == 4 ? 3 : V == 2 ? 6 : 8);

inline int64_t whole(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

// A matrix: numbers from row to row, and from column to column.
struct View {
  const float* at;
  int64_t row, column;
};

// What is multiplied: floats, or pairs of bf16 that follow each other in the depth, each in the place of a float.
struct Nothing {
  ~Nothing() {}  // so that nobody says that it is not used
};
struct Single {
  static constexpr int DEEP = 1;
  using Unit = Nothing;  // what a thread must have while it multiplies so
  static Floats every(const float* at) { return all(*at); }
  static Floats add(Floats total, Floats a, Floats b) { return total + a * b; }
};
#if defined(WEFT_AVX512) && defined(__AVX512BF16__)
struct Pair {
  static constexpr int DEEP = 2;
  using Unit = Nothing;
  static Floats every(const float* at) { return (Floats)alike(at); }  // two numbers are no float to compute with
  static Floats add(Floats total, Floats a, Floats b) { return _mm512_dpbf16_ps(total, (__m512bh)a, (__m512bh)b); }
};
template <class T>
using Multiplied = std::conditional_t<std::is_same_v<T, bf16>, Pair, Single>;
#else
template <class T>
using Multiplied = Single;
#endif
#if defined(WEFT_TILES)
struct Tiled : Pair {  // the same pairs, whole blocks at once
  using Unit = tiles::Unit;
};
template <class E>
constexpr bool TILED = std::is_same_v<E, Tiled>;
#else
template <class E>
constexpr bool TILED = false;
#endif

// f(a number, E) of what the numbers are, bf16 if narrow, and how they are multiplied here.
template <class F>
inline void with_type(bool narrow, F f) {
  if (!narrow) return f(float(), Single());
#if defined(WEFT_TILES)
  if (tiles::ready()) return f(bf16(), Tiled());
#endif
  f(bf16(), Multiplied<bf16>());
}

// How deep a product is, in what is multiplied, over so many numbers.
template <class E>
inline int64_t deep(int64_t n) { return (n + E::DEEP - 1) / E::DEEP; }

// Where a product goes: into c, times `by`; or, if by is 1, the sums that are there go on.
struct Into {
  float* c;
  int64_t row;
  float by;
  bool more;
  Floats start(int64_t r, int64_t n) const { return more ? load(c + r * row + n) : Floats{}; }
  auto column(int64_t n) const {
    return [this, n](int64_t r, Floats sum) { store(c + r * row + n, sum * by); };
  }
};
// To f(a column)(a row, a vector of sums).
template <class F>
struct To {
  F f;
  Floats start(int64_t, int64_t) const { return Floats{}; }
  auto column(int64_t n) const { return f(n); }
};

// R rows from `row` on and V vectors from `n` on of a [rows, depth] b [depth, width].
template <class E, int R, int V, class Out>
inline void tile(View a, const float* b, int64_t b_row, int64_t depth, int64_t row, int64_t n, const Out& out) {
  Floats sums[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) sums[r][v] = out.start(row + r, n + v * LANES);
  const float* left = a.at + row * a.row;
  for (int64_t k = 0; k < depth; k++) {
    Floats right[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) right[v] = load(b + k * b_row + n + v * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const Floats one = E::every(left + r * a.row + k * a.column);
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) sums[r][v] = E::add(sums[r][v], one, right[v]);
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < V; v++) {
    const auto put = out.column(n + v * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) put(row + r, sums[r][v]);
  }
}

template <class E, int R, int V, class Out>
inline void rest(int64_t rows, View a, const float* b, int64_t b_row, int64_t depth, int64_t row, int64_t n,
                 const Out& out) {
  if constexpr (R > 0)
    rows == R ? tile<E, R, V>(a, b, b_row, depth, row, n, out) : rest<E, R - 1, V>(rows, a, b, b_row, depth, row, n, out);
}

template <class E, int V, class Out>
inline void columns(int64_t rows, View a, const float* b, int64_t b_row, int64_t depth, int64_t n, const Out& out) {
  constexpr int R = HIGH<V>;
  int64_t row = 0;
  for (; row + R <= rows; row += R) tile<E, R, V>(a, b, b_row, depth, row, n, out);
  rest<E, R - 1, V>(rows - row, a, b, b_row, depth, row, n, out);
}

// a [rows, depth] b [depth, width], whose width is in whole vectors.
template <class E, class Out>
inline void multiplied(int64_t rows, int64_t depth, int64_t width, View a, const float* b, int64_t b_row, const Out& out) {
  int64_t n = 0;
  for (; n + 4 * LANES <= width; n += 4 * LANES) columns<E, 4>(rows, a, b, b_row, depth, n, out);
  for (; n + 2 * LANES <= width; n += 2 * LANES) columns<E, 2>(rows, a, b, b_row, depth, n, out);
  if (n < width) columns<E, 1>(rows, a, b, b_row, depth, n, out);
}

#if defined(WEFT_TILES)
// The same in blocks; what is not in whole ones, or stands in columns, is copied into such.
inline void blocked(int64_t rows, int64_t depth, int64_t width, View a, const float* b, int64_t b_row, float* c,
                    int64_t c_row, float by, bool more) {
  using namespace tiles;
  static thread_local std::vector<bf16> memory;
  const int64_t whole = depth / SIDE, rest = depth % SIDE, all = whole + (rest != 0), apart = all * BLOCK;
  const bool ready = a.column == 1 && rows % SIDE == 0 && !rest;
  at_least(memory, (ready ? 0 : blocks(rows, SIDE) * apart) + (rest ? blocks(width, SIDE) * BLOCK : 0) + DEPTH);
  bf16* left = memory.data();
  left += (64 - reinterpret_cast<uintptr_t>(left) % 64) / sizeof(bf16) % DEPTH;
  bf16* right = left + (ready ? 0 : blocks(rows, SIDE) * apart);
  for (int64_t m = 0; m < rows && !ready; m += SIDE)
    for (int64_t k = 0; k < all; k++) {
      Floats square[SIDE];
      const bool columns = a.column != 1;
      const int64_t deep = std::min(SIDE, depth - k * SIDE), high = std::min(SIDE, rows - m);
      const auto line = [&](int64_t i) {
        const int64_t count = columns ? high : deep;
        const float* at = columns ? a.at + (k * SIDE + i) * a.column + m : a.at + (m + i) * a.row + k * SIDE;
        return i < (columns ? deep : high) ? (Floats)_mm512_maskz_loadu_ps((1u << count) - 1, at) : Floats{};
      };
#pragma GCC unroll 16
      for (int64_t i = 0; i < SIDE; i++) square[i] = line(i);
      put(square, columns, left + m / SIDE * apart + k * BLOCK);
    }
  for (int64_t n = 0; n < width && rest; n += SIDE)
    for (int64_t i = 0; i < SIDE; i++)
      store(reinterpret_cast<float*>(right) + n * SIDE + i * SIDE,
            i < rest ? load(b + (whole * SIDE + i) * b_row + n) : Floats{});
  const Factor stands = {reinterpret_cast<const bf16*>(a.at), 2 * a.row, 2 * SIDE * a.row, DEPTH};
  const Factor l = ready ? stands : in_blocks(left, apart);
  const Factor r = {reinterpret_cast<const bf16*>(b), 2 * b_row, DEPTH, 2 * SIDE * b_row};
  if (whole || !rest) multiply_into(rows, l, r, whole, width, c, c_row, more);
  if (rest)
    multiply_into(rows, in_blocks(l.at + whole * BLOCK, apart), in_blocks(right, BLOCK), 1, width, c, c_row,
                  more || whole);
  for (int64_t m = 0; m < rows && by != 1.0f; m++)
    for (int64_t n = 0; n < width; n += LANES) store(c + m * c_row + n, load(c + m * c_row + n) * by);
}
#endif

// c [rows, width] = by · a [rows, depth] b [depth, width]; or, if by is 1, the sums that are there go on. The width is in
// whole vectors.
template <class E>
inline void product(int64_t rows, int64_t depth, int64_t width, View a, const float* b, int64_t b_row, float* c,
                    int64_t c_row, float by = 1.0f, bool more = false) {
#if defined(WEFT_TILES)
  if constexpr (TILED<E>) return blocked(rows, depth, width, a, b, b_row, c, c_row, by, more);
#endif
  multiplied<E>(rows, depth, width, a, b, b_row, Into{c, c_row, by, more});
}

template <class T>
inline T* vector(const Heads& x, int64_t row, int64_t head, int64_t token) {
  return static_cast<T*>(x.at) + row * x.row + head * x.head + token * x.token;
}

// Tokens from `first` on, to be multiplied over their dimensions: [count, wide / DEEP], filled up with zeros.
template <class T, class E>
inline void read(const Heads& x, int64_t row, int64_t head, int64_t first, int64_t count, int64_t dim, float* to,
                 int64_t wide) {
  for (int64_t n = 0; n < count; n++, to += wide / E::DEEP) {
    const T* from = vector<T>(x, row, head, first + n);
    if constexpr (E::DEEP == 1) {
      each(dim, [&](auto at) { at.put(to, at.get(from)); });
      std::fill(to + dim, to + wide, 0.0f);
    } else {
      T* narrow = reinterpret_cast<T*>(to);
      const int64_t whole = dim / LANES * LANES;
      for (int64_t i = 0; i < whole; i += LANES) std::memcpy(narrow + i, from + i, LANES * sizeof(T));  // a vector
      if (whole < wide) {
        std::copy(from + whole, from + dim, narrow + whole);
        std::fill(narrow + dim, narrow + wide, T{});
      }
    }
  }
}

// Pairs of what stands below each other in two rows of so many numbers, in whole vectors; `high` may be missing.
inline void pairs(const bf16* low, const bf16* high, int64_t count, float* to) {
  int64_t i = 0;
#if defined(WEFT_AVX512)
  __m512i first, second;  // of 32 pairs, where the numbers of the first 16 stand, and of the others
  for (int j = 0; j < 32; j++) ((Shorts&)first)[j] = j / 2 + j % 2 * 32, ((Shorts&)second)[j] = 16 + j / 2 + j % 2 * 32;
  for (; i + 2 * LANES <= count; i += 2 * LANES) {
    const __m512i a = _mm512_loadu_si512(low + i), b = high == nullptr ? __m512i{} : _mm512_loadu_si512(high + i);
    store(to + i, (Floats)_mm512_permutex2var_epi16(a, first, b));
    store(to + i + LANES, (Floats)_mm512_permutex2var_epi16(a, second, b));
  }
#endif
  for (; i < count; i += LANES)
    store(to + i, (Floats)((Words)load(low + i) >> 16 | (high == nullptr ? Words{} : (Words)load(high + i))));
}

// The same, to be multiplied over the tokens: [count / DEEP, wide]. In `room`, if they must stand otherwise for that.
template <class E>
inline const float* woven(const float* rows, int64_t count, int64_t wide, float* room) {
  if constexpr (E::DEEP == 1) {
    return rows;
  } else {
    const auto* from = reinterpret_cast<const bf16*>(rows);
    float* to = room;
    for (int64_t n = 0; n < count; n += 2, from += 2 * wide, to += wide)
      pairs(from, n + 1 < count ? from + wide : nullptr, wide, to);
    return room;
  }
}

template <class T>
inline void write(const Heads& x, int64_t row, int64_t head, int64_t first, int64_t count, int64_t dim,
                  const float* from, int64_t wide) {
  for (int64_t n = 0; n < count; n++, from += wide) {
    T* to = vector<T>(x, row, head, first + n);
    each(dim, [&](auto at) { at.put(to, at.get(from)); });
  }
}

// [count, wide] as [wide, step], both in whole vectors; filled up with zeros to the last vector.
inline void turned(const float* from, int64_t count, int64_t wide, float* to, int64_t step) {
  for (int64_t n = 0; n < count; n += LANES)
    for (int64_t d = 0; d < wide; d += LANES) {
      Floats square[LANES];
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++) square[i] = n + i < count ? load(from + (n + i) * wide + d) : Floats{};
      turn(square);
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++) store(to + (d + i) * step + n, square[i]);
    }
}

// Room for one head of one row, of which a thread makes use again and again.
struct Room {
  int64_t wide, step, words;  // numbers of a vector, of a row of weights, in whole vectors; of a row's decisions
  int64_t* decisions;
  float *q, *k, *v, *grad;            // to be multiplied over dimensions
  float *woven_q, *woven_k, *woven_v, *woven_grad;  // over tokens
  float *turned_k, *turned_v;
  float *weights, *slopes, *narrow, *woven_narrow;
  float *some, *dk, *dv;

  Room(const Attention& a, int deep, std::vector<float>& memory, std::vector<int64_t>& bits)
      : wide((a.dim + deep * LANES - 1) / (deep * LANES) * (deep * LANES)), step(whole(a.keys)), words(step / 4 + 9) {
    at_least(bits, QUERIES * words);
    decisions = bits.data();
    const int64_t few = QUERIES * wide, keys = (a.keys + 1) * wide, turned = wide * step, scores = QUERIES * step;
    at_least(memory, 5 * few + 6 * keys + 2 * turned + 4 * scores);
    float* at = memory.data();
    const auto take = [&](int64_t count) { return (at += count) - count; };
    q = take(few), grad = take(few), some = take(few), woven_q = take(few), woven_grad = take(few);
    k = take(keys), v = take(keys), dk = take(keys), dv = take(keys), woven_k = take(keys), woven_v = take(keys);
    turned_k = take(turned), turned_v = take(turned);
    weights = take(scores), slopes = take(scores), narrow = take(scores), woven_narrow = take(scores);
  }
};

// A block of queries of one head: which they are, and the keys outside of which they see nothing.
struct Part {
  int64_t first, count, keys, width;
};

// How many keys a query sees.
inline int64_t seen(const Attention& a, int64_t query, int64_t keys) {
  return a.causal ? std::min(query + 1, keys) : keys;
}

inline int64_t real_keys(const Attention& a, int64_t row) {
  return a.lengths == nullptr ? a.keys : std::clamp<int64_t>(a.lengths[row], 0, a.keys);
}

// f(part) for all queries of a head, of which the keys are so many.
template <class F>
inline void parts(const Attention& a, int64_t keys, F f) {
  for (int64_t first = 0; first < a.queries; first += QUERIES) {
    const int64_t count = std::min<int64_t>(QUERIES, a.queries - first), most = seen(a, first + count - 1, keys);
    f(Part{first, count, most, whole(most)});
  }
}

// The weights of a block whose queries and turned keys are there; 0 for what is not seen.
template <class E>
inline void weigh(const Attention& a, const Room& room, const Part& part, int64_t keys) {
  product<E>(part.count, deep<E>(a.dim), part.width, {room.q, room.wide / E::DEEP, 1}, room.turned_k, room.step,
             room.weights, room.step, a.scale);
  Ints places;
  for (int i = 0; i < LANES; i++) places[i] = i;
  for (int64_t n = 0; n < part.count; n++) {
    float* w = room.weights + n * room.step;
    const int open = int(seen(a, part.first + n, keys));
    if (!open) {
      std::fill(w, w + part.width, 0.0f);
      continue;
    }
    Floats tops = all(-INFINITY), sums = {};
    for (int j = 0; j < part.width; j += LANES) tops = larger(places < open - j ? load(w + j) : all(-INFINITY), tops);
    const float high = largest(tops);
    for (int j = 0; j < part.width; j += LANES) {
      const Floats e = places < open - j ? exp(load(w + j) - high) : Floats{};
      store(w + j, e);
      sums += e;
    }
    const float by = 1.0f / sum(sums);
    for (int j = 0; j < part.width; j += LANES) store(w + j, load(w + j) * by);
  }
}

// Which weights of a block are kept, for `drop`.
inline void draw(const Attention& a, const Room& room, const Part& part, int64_t row, int64_t head) {
  if (a.kept == 0.0f) return;
  const int64_t words = (a.rows * a.heads * a.queries * a.keys + 3) / 4;
  for (int64_t n = 0; n < part.count; n++) {
    const int64_t first = ((row * a.heads + head) * a.queries + part.first + n) * a.keys;
    decide(a.key, words, first / 4, (first % 4 + part.keys + 3) / 4, room.decisions + n * room.words);
  }
}

inline void drop(const Attention& a, const Room& room, const Part& part, float* weights, int64_t row, int64_t head) {
  typedef int16_t Some WEFT_VECTOR(int16_t, LANES);
  if (a.kept == 0.0f) return;
  for (int64_t n = 0; n < part.count; n++) {
    const int64_t first = ((row * a.heads + head) * a.queries + part.first + n) * a.keys;
    const auto* bits = reinterpret_cast<const int16_t*>(room.decisions + n * room.words) + first % 4;
    float* w = weights + n * room.step;
    for (int64_t j = 0; j < part.width; j += LANES) {
      const Ints drawn = __builtin_convertvector(*reinterpret_cast<const Some*>(bits + j), Ints);
      store(w + j, drawn < a.bound ? load(w + j) * a.kept : Floats{});
    }
  }
}

// Weights and their gradients become the gradients of the scores.
inline void slope(const Room& room, const Part& part, float scale) {
  for (int64_t n = 0; n < part.count; n++) {
    const float* w = room.weights + n * room.step;
    float* s = room.slopes + n * room.step;
    Floats sums = {};
    for (int64_t j = 0; j < part.width; j += LANES) sums += load(w + j) * load(s + j);
    const float mean = sum(sums);
    for (int64_t j = 0; j < part.width; j += LANES) store(s + j, load(w + j) * (load(s + j) - mean) * scale);
  }
}

// Weights or slopes of a block [queries, keys], to be multiplied over keys.
template <class E>
inline View over_keys(const Room& room, const Part& part, const float* scores) {
  if constexpr (E::DEEP == 1) return {scores, room.step, 1};
  auto* to = reinterpret_cast<bf16*>(room.narrow);
  for (int64_t n = 0; n < part.count; n++)
    for (int64_t j = 0; j < part.width; j += LANES) store(to + n * room.step + j, load(scores + n * room.step + j));
  return {room.narrow, room.step / E::DEEP, 1};
}

// The same turned, to be multiplied over queries: of what `over_keys` has just made.
template <class E>
inline View over_queries(const Room& room, const Part& part, View scores) {
  return {woven<E>(scores.at, part.count, room.step, room.woven_narrow), 1, room.step};
}

template <class T, class E>
inline void forward(const Attention& a, int64_t row, int64_t group, const Room& room) {
  const int64_t keys = real_keys(a, row), shared = a.heads / a.groups, wide = room.wide, step = room.step;
  read<T, E>(a.k, row, group, 0, keys, a.dim, room.k, wide);
  read<T, E>(a.v, row, group, 0, keys, a.dim, room.v, wide);
  turned(room.k, keys, wide / E::DEEP, room.turned_k, step);
  const float* v = woven<E>(room.v, keys, wide, room.woven_v);
  for (int64_t head = group * shared; head < (group + 1) * shared; head++)
    parts(a, keys, [&](const Part& part) {
      read<T, E>(a.q, row, head, part.first, part.count, a.dim, room.q, wide);
      weigh<E>(a, room, part, keys);
      draw(a, room, part, row, head);
      drop(a, room, part, room.weights, row, head);
      const View weights = over_keys<E>(room, part, room.weights);
      product<E>(part.count, deep<E>(part.keys), wide, weights, v, wide, room.some, wide);
      write<T>(a.out, row, head, part.first, part.count, a.dim, room.some, wide);
    });
}

template <class T, class E>
inline void backward(const Attention& a, int64_t row, int64_t group, const Room& room) {
  const int64_t keys = real_keys(a, row), shared = a.heads / a.groups, wide = room.wide, step = room.step;
  read<T, E>(a.k, row, group, 0, keys, a.dim, room.k, wide);
  read<T, E>(a.v, row, group, 0, keys, a.dim, room.v, wide);
  turned(room.k, keys, wide / E::DEEP, room.turned_k, step);
  turned(room.v, keys, wide / E::DEEP, room.turned_v, step);
  const float* k = woven<E>(room.k, keys, wide, room.woven_k);
  std::fill(room.dk, room.dk + a.keys * wide, 0.0f);
  std::fill(room.dv, room.dv + a.keys * wide, 0.0f);
  for (int64_t head = group * shared; head < (group + 1) * shared; head++)
    parts(a, keys, [&](const Part& part) {
      const int64_t depth = deep<E>(part.count);
      read<T, E>(a.q, row, head, part.first, part.count, a.dim, room.q, wide);
      read<T, E>(a.out, row, head, part.first, part.count, a.dim, room.grad, wide);
      const float* q = woven<E>(room.q, part.count, wide, room.woven_q);
      const float* grad = woven<E>(room.grad, part.count, wide, room.woven_grad);
      weigh<E>(a, room, part, keys);
      draw(a, room, part, row, head);
      product<E>(part.count, deep<E>(a.dim), part.width, {room.grad, wide / E::DEEP, 1}, room.turned_v, step,
                 room.slopes, step);
      drop(a, room, part, room.slopes, row, head);
      slope(room, part, a.scale);
      const View slopes = over_keys<E>(room, part, room.slopes);
      product<E>(part.count, deep<E>(part.keys), wide, slopes, k, wide, room.some, wide);
      write<T>(a.dq, row, head, part.first, part.count, a.dim, room.some, wide);
      product<E>(part.keys, depth, wide, over_queries<E>(room, part, slopes), q, wide, room.dk, wide, 1.0f, true);
      drop(a, room, part, room.weights, row, head);
      const View weights = over_queries<E>(room, part, over_keys<E>(room, part, room.weights));
      product<E>(part.keys, depth, wide, weights, grad, wide, room.dv, wide, 1.0f, true);
    });
  write<T>(a.dk, row, group, 0, a.keys, a.dim, room.dk, wide);
  write<T>(a.dv, row, group, 0, a.keys, a.dim, room.dv, wide);
}

}  // namespace attention

// Key heads from `begin` to `end`, counted through all rows: with their queries, forward or backward.
template <class T, class E>
inline void attend(const Attention& a, int64_t begin, int64_t end, bool back) {
  static thread_local std::vector<float> memory;
  static thread_local std::vector<int64_t> bits;
  const attention::Room room(a, E::DEEP, memory, bits);
  for (int64_t item = begin; item < end; item++)
    back ? attention::backward<T, E>(a, item / a.groups, item % a.groups, room)
         : attention::forward<T, E>(a, item / a.groups, item % a.groups, room);
}

}  // namespace weft
