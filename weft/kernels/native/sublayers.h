// A whole sub-layer of training in one call, and its gradients: x + dropout(f(norm(x))), where f is a feed-forward or
// self-attention. Some sequences at a time go through all of it while they are near; the rest of the memory sees what
// must be kept for the way back, and that once.
//
// What is read and written is float or bf16, and so are the factors of products; all sums are in float. Every width is
// in whole vectors.
#pragma once

#include <atomic>
#include <new>

#include "attention.h"
#include "rows.h"
#include "threads.h"
#include "tiles.h"

namespace weft {

// Up to three linear layers of one input, whose outputs stand side by side.
struct Joined {
  const float* weight[3];  // [outs, in]
  const float* bias[3];    // may be null, all or none
  int64_t outs[3];
  int64_t in;
  int64_t out() const { return outs[0] + outs[1] + outs[2]; }
  // Row n of the matrices, one below the other.
  const float* row(int64_t n) const {
    int i = 0;
    for (; n >= outs[i]; i++) n -= outs[i];
    return weight[i] + n * in;
  }
  const float* bias_at(int64_t n) const {
    int i = 0;
    for (; n >= outs[i]; i++) n -= outs[i];
    return bias[i] == nullptr ? nullptr : bias[i] + n;
  }
};

// The gradients' memory, [gradients]: of the first layers [out, in] and their biases, of the last and its bias, of the
// norm's gains and bias; each is there whether there is such a bias or not.
struct Sublayer {
  Norming norm;        // of x [rows, n]
  Joined first, last;
  Attention attention; // its places; rows 0: it is a feed-forward
  Drop drop;           // of what is added; kept 0: nothing is dropped
  const float *cos, *sin;  // [length, head / 2] by which queries and keys are turned, or null
  int64_t length;      // of a sequence
  int32_t activation, pairs;  // pairs: neighbours are turned together, and not halves
  void* between;       // [rows, first.out]: what the first layers gave, queries and keys turned
  void* inside;        // [rows, last.in]: what the last layer took
  void* y;             // [rows, n]
  const void* grad;    // of y
  void* dx;
  float* gradients;
};

namespace sublayers {

using attention::deep;
using attention::TILED;

constexpr int64_t PANEL = 4 * LANES;  // columns that are multiplied together
constexpr int64_t TILE = 128;         // rows that go through a sub-layer together, or a sequence, if that is longer
constexpr int64_t ALIGNED = 16;       // floats: what several threads or the unit for blocks work on begins so
inline int64_t aligned(int64_t floats) { return (floats + ALIGNED - 1) / ALIGNED * ALIGNED; }

// Numbers that follow each other, from here on, as they are multiplied over them: pairs of bf16 in the place of a float.
template <class E>
inline Floats along(const float* at, int64_t count) {
  if constexpr (E::DEEP == 1) {
    return load(at);
  } else {
    bf16 few[2 * LANES];
    store(few, load(at));
    store(few + LANES, count > LANES ? load(at + LANES) : Floats{});
    return load(reinterpret_cast<const float*>(few));
  }
}

inline Floats rounded(const bf16* at) { return load(at); }
inline Floats rounded(const float* at) {
  bf16 few[LANES];
  store(few, load(at));
  return load(few);
}

// A panel of a matrix [depth, w] for products over its depth: [depth / DEEP, w]; row(k): where its row k stands.
template <class E, class F>
inline void weave(int64_t depth, int64_t w, F row, float* to) {
  for (int64_t k = 0; k < depth; k += E::DEEP, to += w)
    for (int64_t i = 0; i < w; i += LANES)
      if constexpr (E::DEEP == 1) {
        store(to + i, load(row(k) + i));
      } else {
        const Floats low = rounded(row(k) + i), high = k + 1 < depth ? rounded(row(k + 1) + i) : Floats{};
        store(to + i, (Floats)((Words)low >> 16 | (Words)high));
      }
}

// The same of a matrix whose columns are given: column(n), of fp32.
template <class E, class F>
inline void weave_turned(int64_t depth, int64_t w, F column, float* to) {
  const int64_t most = deep<E>(depth);
  for (int64_t n = 0; n < w; n += LANES)
    for (int64_t k = 0; k < most; k += LANES) {
      Floats square[LANES];
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++) square[i] = along<E>(column(n + i) + k * E::DEEP, depth - k * E::DEEP);
      turn(square);
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++)
        if (k + i < most) store(to + (k + i) * w + n, square[i]);
    }
}

// f(first column, columns) of each panel.
template <class F>
inline void panels(int64_t width, F f) {
  for (int64_t n = 0; n < width; n += PANEL) f(n, std::min(PANEL, width - n));
}

// How layers are packed for the way that E multiplies, and multiplied by.
template <class E>
struct Packing {
  // Floats of a layer; and, for so many rows of a tile and the widest that they become, of room to work in.
  static int64_t size(int64_t depth, int64_t width) { return aligned(deep<E>(depth) * width + LANES); }
  static int64_t room(int64_t rows, int64_t widest) { return aligned(rows * (PANEL + widest) + PANEL * (rows + 1)); }

  // Columns n to n + w of a factor of this depth: row(i) of column i; or, `across`, the part of its row i.
  template <class F>
  static void pack(bool across, int64_t depth, int64_t n, int64_t w, F row, float* to) {
    across ? weave<E>(depth, w, row, to + n * deep<E>(depth)) : weave_turned<E>(depth, w, row, to + n * deep<E>(depth));
  }

  // Rows of x times a packed factor: f(first row, rows, first column, columns, result, its row) piece by piece.
  template <class T, class F>
  static void times(int64_t rows, const T* x, int64_t depth, const float* factor, int64_t width, float* some, F f) {
    panels(width, [&](int64_t n, int64_t w) {
      attention::product<E>(rows, deep<E>(depth), w, {reinterpret_cast<const float*>(x), depth / E::DEEP, 1},
                            factor + n * deep<E>(depth), w, some, PANEL);
      f(int64_t{0}, rows, n, w, some, PANEL);
    });
  }
};

// to [out, in] += gradᵀ x over rows.
template <class E, class T>
inline void add_gradients(int64_t rows, const T* grad, int64_t out, const T* x, int64_t in, float* to, float* some) {
  float* panel = some + rows * out;
  const float* left = attention::woven<E>(reinterpret_cast<const float*>(grad), rows, out, some);
  panels(in, [&](int64_t n, int64_t w) {
    weave<E>(rows, w, [&](int64_t k) { return x + k * in + n; }, panel);
    attention::product<E>(out, deep<E>(rows), w, {left, 1, out}, panel, w, to + n, in, 1.0f, true);
  });
}

// sums [width] += rows of x.
template <class T>
inline void add_rows(int64_t rows, const T* x, int64_t width, float* sums) {
  for (int64_t i = 0; i < width; i += LANES) {
    Floats all = load(sums + i);
    for (int64_t r = 0; r < rows; r++) all += load(x + r * width + i);
    store(sums + i, all);
  }
}

#if defined(WEFT_TILES)
using attention::Tiled;

template <>
struct Packing<Tiled> {
  static int64_t size(int64_t depth, int64_t width) { return weft::tiles::packed(width, depth) / 2; }
  static int64_t room(int64_t, int64_t widest) { return size(widest, weft::tiles::PAIR); }

  template <class F>
  static void pack(bool across, int64_t depth, int64_t n, int64_t w, F row, float* to) {
    using namespace weft::tiles;
    const int64_t apart = steps(depth) * BLOCK;
    bf16* at = reinterpret_cast<bf16*>(to) + n / SIDE * apart;
    across ? pack_columns(w, depth, row, false, at, apart) : pack_rows(w, depth, row, true, at, apart);
  }

  template <class F>
  static void times(int64_t rows, const bf16* x, int64_t depth, const float* factor, int64_t width, float* some, F f) {
    using namespace weft::tiles;
    const int64_t apart = steps(depth) * BLOCK;
    for (int64_t m = 0; m < rows; m += PAIR) {
      const int64_t high = std::min(PAIR, rows - m);
      Factor left = {x + m * depth, depth, SIDE * depth, DEPTH};
      if (high % SIDE || depth % DEPTH) {
        bf16* room = reinterpret_cast<bf16*>(some);
        pack_rows(high, depth, [&](int64_t r) { return x + (m + r) * depth; }, false, room, apart);
        left = in_blocks(room, apart);
      }
      Unit::written();
      multiply(high, left, in_blocks(reinterpret_cast<const bf16*>(factor), apart), steps(depth), width,
               [&](int64_t n, int64_t w, const float* z) { f(m, high, n, w, z, PAIR); });
    }
  }
};

// What the gradient of a layer is made of, in blocks: its output's gradients and its inputs, over the rows of some tiles.
struct Kept {
  bf16 *left, *right;
  int64_t out, in, steps;  // of all these tiles

  template <class T>
  void keep(int64_t step, int64_t rows, const T* grad, const T* x) const {
    using namespace weft::tiles;
    pack_columns(out, rows, [&](int64_t k) { return grad + k * out; }, true, left + step * BLOCK, steps * BLOCK);
    pack_columns(in, rows, [&](int64_t k) { return x + k * in; }, false, right + step * BLOCK, steps * BLOCK);
  }

  // A worker's share of the product of so many steps: into `to` [out, in], or onto what is there.
  void multiply(int64_t depth, float* to, bool more, int worker, int workers) const {
    using namespace weft::tiles;
    const Factor a = in_blocks(left, steps * BLOCK), b = in_blocks(right, steps * BLOCK);
    const bool by_rows = out >= in;  // the wider side is read once, the other from a nearer cache
    const int64_t parts = blocks(by_rows ? out : in, PAIR);
    Unit::written();
    for (int64_t part = parts * worker / workers; part < parts * (worker + 1) / workers; part++) {
      const int64_t at = part * PAIR;
      if (by_rows)
        multiply_into(std::min(PAIR, out - at), a.from(at), b, depth, in, to + at * in, in, more);
      else
        multiply_into(out, a, b.from(at), depth, std::min(PAIR, in - at), to + at, in, more);
    }
  }
};
#endif

// Where the gradients of parameters go, or are added up.
struct Gradients {
  float *first, *first_bias, *last, *last_bias, *norm;
};

// Everything that one call works on.
template <class T, class E>
struct Work {
  const Sublayer& s;
  const bool back, gated;
  const int64_t dim, wide, inner, sequences, together, count;
  float *first, *last;  // the layers in panels, as this pass multiplies by them

  Work(const Sublayer& s, bool back)
      : s(s), back(back), gated(!s.attention.rows && s.activation == SWIGLU), dim(s.norm.n), wide(s.first.out()),
        inner(s.last.in), sequences(s.norm.rows / s.length), together(std::max<int64_t>(1, TILE / s.length)),
        count((sequences + together - 1) / together) {}

  int64_t size() const { return wide * dim + wide + dim * inner + 3 * dim; }  // of the gradients
  int64_t most() const { return together * s.length; }                         // rows of a tile
  int64_t packed_first() const { return back ? Packing<E>::size(wide, dim) : Packing<E>::size(dim, wide); }
  int64_t packed_last() const { return back ? Packing<E>::size(dim, inner) : Packing<E>::size(inner, dim); }

  Gradients gradients(float* at) const {
    float *first_bias = at + wide * dim, *last = first_bias + wide, *last_bias = last + dim * inner;
    return {at, first_bias, last, last_bias, last_bias + dim};
  }

  // Floats that a thread needs for a tile.
  int64_t room() const {
    const int64_t vectors = 2 * dim + inner + wide;  // of T
    return aligned(2 * dim) + Packing<E>::room(most(), std::max({wide, inner, dim})) + aligned(most() * vectors);
  }

  // Panels from number `begin` on, each step-th.
  void pack(int begin, int step) {
    int turn = 0;
    const auto each_panel = [&](bool across, const Joined& layer, int64_t depth, int64_t width, float* to) {
      panels(width, [&](int64_t n, int64_t w) {
        if (turn++ % step != begin) return;
        if (across)
          Packing<E>::pack(true, depth, n, w, [&](int64_t k) { return layer.row(k) + n; }, to);
        else
          Packing<E>::pack(false, depth, n, w, [&](int64_t i) { return layer.row(n + i); }, to);
      });
    };
    each_panel(back, s.first, back ? wide : dim, back ? dim : wide, first);
    each_panel(back, s.last, back ? dim : inner, back ? inner : dim, last);
  }

  // What stands between the layers [count, inner], from what the first gave; and on the way back, its gradient.
  template <class F>
  void activations(int64_t count, F f) const {
    if (!gated) return f(int64_t{0}, int64_t{0}, count * inner);
    for (int64_t r = 0; r < count; r++) f(r * wide, r * inner, inner);
  }

  // Queries and keys of sequences, turned by their angles, or back.
  void turn(T* x, int64_t rows, float way) const {
    if (s.cos == nullptr) return;
    const int64_t half = s.attention.dim / 2, heads = s.attention.heads + s.attention.groups;
    for (int64_t r = 0; r < rows; r++) {
      const float *cos = s.cos + r % s.length * half, *sin = s.sin + r % s.length * half;
      for (int64_t h = 0; h < heads; h++) {
        T* head = x + r * wide + h * 2 * half;
        if (s.pairs) {
          for (int64_t i = 0; i < half; i++) {
            const float a = One{2 * i}.get(head), b = One{2 * i + 1}.get(head), side = way * sin[i];
            One{2 * i}.put(head, a * cos[i] - b * side), One{2 * i + 1}.put(head, b * cos[i] + a * side);
          }
          continue;
        }
        rows::vectors(half, [&](auto at) {
          const Floats a = at.get(head), b = at.get(head + half), c = at.get(cos), side = way * at.get(sin);
          at.put(head, a * c - b * side), at.put(head + half, b * c + a * side);
        });
      }
    }
  }

  // Attention of sequences from `begin` to `end`, whose queries, keys and values are at `x`, what comes of them (or
  // its gradient) at `out`, and the gradients of the former at `dx`: of the first of these sequences.
  void attend(int64_t begin, int64_t end, T* x, T* out, T* dx) const {
    Attention a = s.attention;
    const int64_t keys = a.heads * a.dim, values = keys + a.groups * a.dim;
    const auto places = [&](T* at, int64_t width) {
      return Heads{at - begin * s.length * width, s.length * width, a.dim, width};
    };
    a.q = places(x, wide), a.k = places(x + keys, wide), a.v = places(x + values, wide), a.out = places(out, inner);
    a.dq = places(dx, wide), a.dk = places(dx + keys, wide), a.dv = places(dx + values, wide);
    weft::attend<T, E>(a, begin * a.groups, end * a.groups, back);
  }

  void forward(int64_t tile, float* memory) const {
    const int64_t begin = tile * together, end = std::min(begin + together, sequences);
    const int64_t from = begin * s.length, rows = (end - begin) * s.length;
    const T* x = static_cast<const T*>(s.norm.x) + from * dim;
    T *between = static_cast<T*>(s.between) + from * wide, *y = static_cast<T*>(s.y) + from * dim;
    T* inside = static_cast<T*>(s.inside) + from * inner;
    T* normed = reinterpret_cast<T*>(memory);
    float* some = memory + aligned(rows * dim);
    normalise(s.norm, from, from + rows, normed - from * dim);
    Packing<E>::times(rows, normed, dim, first, wide, some, [&](int64_t m, int64_t high, int64_t n, int64_t w, const float* z, int64_t row) {
      put(high, n, w, z, row, &s.first, between + m * wide, wide);
    });
    if (s.attention.rows) {
      turn(between, rows, 1.0f);
      attend(begin, end, between, inside, between);
    } else {
      with_activation(s.activation, [&](auto f) {
        activations(rows, [&](int64_t in, int64_t out, int64_t n) {
          const T* given = between + in;
          activate<decltype(f)::value>(gated ? given + inner : given, gated ? given : nullptr, inside + out, n);
        });
      });
    }
    Packing<E>::times(rows, inside, inner, last, dim, some, [&](int64_t m, int64_t high, int64_t n, int64_t w, const float* z, int64_t row) {
      put(high, n, w, z, row, &s.last, y + m * dim, dim, s.drop.kept == 0.0f ? x + m * dim : nullptr);
    });
    if (s.drop.kept != 0.0f) {
      T* whole = static_cast<T*>(s.y);
      weft::drop(s.drop, whole, static_cast<const T*>(s.norm.x), whole, from * dim, (from + rows) * dim);
    }
  }

  // Columns of y [rows, width]: what a product gave, the bias of these layers, and more, if there are any.
  void put(int64_t rows, int64_t n, int64_t w, const float* z, int64_t row, const Joined* layers, T* y, int64_t width,
           const T* onto = nullptr) const {
    for (int64_t i = 0; i < w; i += LANES) {  // a vector's width of it is of one layer
      const float* bias = layers == nullptr ? nullptr : layers->bias_at(n + i);
      const Floats more = bias == nullptr ? Floats{} : load(bias);
      for (int64_t r = 0; r < rows; r++) {
        const Floats sum = load(z + r * row + i) + more;
        store(y + r * width + n + i, onto == nullptr ? sum : sum + load(onto + r * width + n + i));
      }
    }
  }

  // The gradient of x; and add(of the last layer, the gradient of what it gave and what it took; rows) and the same of
  // the first for the gradients of layers. Those of the rest are added to `to`.
  template <class F>
  void backward(int64_t tile, float* memory, const Gradients& to, F add) const {
    const int64_t begin = tile * together, end = std::min(begin + together, sequences);
    const int64_t from = begin * s.length, rows = (end - begin) * s.length;
    T* between = static_cast<T*>(s.between) + from * wide;
    const T *grad = static_cast<const T*>(s.grad) + from * dim, *inside = static_cast<T*>(s.inside) + from * inner;
    float *norms = memory, *some = norms + aligned(2 * dim);
    T* normed = reinterpret_cast<T*>(some + Packing<E>::room(most(), std::max({wide, inner, dim})));
    T *added = normed + rows * dim, *dinside = added + rows * dim, *dbetween = dinside + rows * inner;

    const T* given = grad;  // the gradient of what the last layer gave
    if (s.drop.kept != 0.0f) {
      weft::drop<T>(s.drop, static_cast<const T*>(s.grad), nullptr, added - from * dim, from * dim, (from + rows) * dim);
      given = added;
    }
    Packing<E>::times(rows, given, dim, last, inner, some, [&](int64_t m, int64_t high, int64_t n, int64_t w, const float* z, int64_t row) {
      put(high, n, w, z, row, nullptr, dinside + m * inner, inner);
    });
    if (s.attention.rows) {
      attend(begin, end, between, dinside, dbetween);
      turn(dbetween, rows, -1.0f);
    } else {
      with_activation(s.activation, [&](auto f) {
        activations(rows, [&](int64_t in, int64_t out, int64_t n) {
          const T *x = between + in + (gated ? inner : 0), *by = gated ? between + in : nullptr;
          T *dx = dbetween + in + (gated ? inner : 0), *dby = gated ? dbetween + in : nullptr;
          activate_back<decltype(f)::value>(x, by, dinside + out, dx, dby, n);
        });
      });
    }
    add(true, rows, given, inside, some);
    add_rows(rows, given, dim, to.last_bias);
    T* dnormed = added;  // what was there is not needed any more
    Packing<E>::times(rows, dbetween, wide, first, dim, some, [&](int64_t m, int64_t high, int64_t n, int64_t w, const float* z, int64_t row) {
      put(high, n, w, z, row, nullptr, dnormed + m * dim, dim);
    });
    normalise(s.norm, from, from + rows, normed - from * dim, true);
    add(false, rows, dbetween, normed, some);
    add_rows(rows, dbetween, wide, to.first_bias);
    normalise_back(s.norm, from, from + rows, dnormed - from * dim, static_cast<T*>(s.dx), norms,
                   static_cast<const T*>(s.grad));
    for (int64_t i = 0; i < 2 * dim; i += LANES) store(to.norm + i, load(to.norm + i) + load(norms + i));
  }
};

// Memory of this thread, from which calls take what they need and leave it; others use it while it waits for them.
class Memory {
 public:
  float* take(int64_t floats) { return (at += aligned(floats)) - aligned(floats); }
  explicit Memory(int64_t floats) {
    static thread_local std::vector<float> all;
    at_least(all, floats + ALIGNED);
    at = all.data() + (-(reinterpret_cast<uintptr_t>(all.data()) / sizeof(float)) & (ALIGNED - 1));
  }

 private:
  float* at;
};

// work(worker) for all workers; what is thrown in their threads is thrown here.
template <class F>
inline void all_of(int workers, F work) {
  std::atomic<bool> failed{false};  // what is thrown must not leave its thread
  shared_out(workers, [&](int worker) {
    try {
      work(worker);
    } catch (const std::bad_alloc&) {
      failed = true;
    }
  });
  if (failed) throw std::bad_alloc();
}

template <class T, class E>
inline void forward(Work<T, E>& work, int workers) {
  const int64_t room = work.room();
  Memory memory(work.packed_first() + work.packed_last() + workers * room + 4 * ALIGNED);
  work.first = memory.take(work.packed_first()), work.last = memory.take(work.packed_last());
  float* rooms = memory.take(workers * room);
  all_of(workers, [&](int worker) { work.pack(worker, workers); });
  all_of(workers, [&](int worker) {
    const typename E::Unit unit;
    for (int64_t tile = work.count * worker / workers; tile < work.count * (worker + 1) / workers; tile++)
      work.forward(tile, rooms + worker * room);
  });
}

// A thread's share of the sequences depends on how many there are, and with it the order in which gradients are summed;
// nothing else does.
template <class T, class E>
inline void backward(Work<T, E>& work, int workers) {
  const int64_t room = work.room(), size = aligned(work.size());
  Memory memory(work.packed_first() + work.packed_last() + workers * (room + size) + 4 * ALIGNED);
  work.first = memory.take(work.packed_first()), work.last = memory.take(work.packed_last());
  float *rooms = memory.take(workers * room), *others = memory.take(workers * size);
  all_of(workers, [&](int worker) { work.pack(worker, workers); });
  const auto sums = [&](int worker) { return worker ? others + worker * size : work.s.gradients; };
  all_of(workers, [&](int worker) {
    std::fill(sums(worker), sums(worker) + work.size(), 0.0f);
    const Gradients to = work.gradients(sums(worker));
    for (int64_t tile = work.count * worker / workers; tile < work.count * (worker + 1) / workers; tile++)
      work.backward(tile, rooms + worker * room, to, [&](bool last, int64_t rows, const T* grad, const T* x, float* some) {
        add_gradients<E>(rows, grad, last ? work.dim : work.wide, x, last ? work.inner : work.dim,
                         last ? to.last : to.first, some);
      });
  });
  if (workers == 1) return;
  shared_out(workers, [&](int worker) {
    const int64_t vectors = work.size() / LANES;
    const int64_t begin = vectors * worker / workers * LANES, end = vectors * (worker + 1) / workers * LANES;
    for (int other = 1; other < workers; other++)
      for (int64_t i = begin; i < end; i += LANES)
        store(work.s.gradients + i, load(work.s.gradients + i) + load(sums(other) + i));
  });
}

#if defined(WEFT_TILES)
// Here the gradients of layers are products over the rows of several tiles, so that sums stay where they are made and no
// thread has any of its own. The rest is summed tile by tile. So nothing depends on the threads.
inline void backward(Work<bf16, Tiled>& work, int workers) {
  using weft::tiles::packed;
  const int64_t room = work.room(), few = aligned(work.wide + 3 * work.dim), steps = weft::tiles::steps(work.most());
  const int64_t some = std::min(work.count, std::max<int64_t>(workers, workers * 4 * TILE / work.most()));
  const int64_t depth = some * steps * weft::tiles::DEPTH;
  const int64_t sides[] = {packed(work.dim, depth), packed(work.inner, depth), packed(work.wide, depth)};
  Memory memory(work.packed_first() + work.packed_last() + workers * room + work.count * few +
                (2 * sides[0] + sides[1] + sides[2]) / 2 + 16 * ALIGNED);
  work.first = memory.take(work.packed_first()), work.last = memory.take(work.packed_last());
  float *rooms = memory.take(workers * room), *sums = memory.take(work.count * few);
  const auto taken = [&](int64_t numbers) { return reinterpret_cast<bf16*>(memory.take(numbers / 2)); };
  const Kept last = {taken(sides[0]), taken(sides[1]), work.dim, work.inner, some * steps};
  const Kept first = {taken(sides[2]), taken(sides[0]), work.wide, work.dim, some * steps};
  const Gradients to = work.gradients(work.s.gradients);
  all_of(workers, [&](int worker) { work.pack(worker, workers); });
  for (int64_t begin = 0; begin < work.count; begin += some) {
    const int64_t end = std::min(begin + some, work.count);
    all_of(workers, [&](int worker) {
      const typename Tiled::Unit unit;
      for (int64_t tile = begin + (end - begin) * worker / workers; tile < begin + (end - begin) * (worker + 1) / workers; tile++) {
        float* own = sums + tile * few;
        std::fill(own, own + few, 0.0f);
        const Gradients here = {nullptr, own, nullptr, own + work.wide, own + work.wide + work.dim};
        work.backward(tile, rooms + worker * room, here, [&](bool of_last, int64_t rows, const bf16* grad, const bf16* x, float*) {
          (of_last ? last : first).keep((tile - begin) * steps, rows, grad, x);
        });
      }
    });
    const int64_t left = std::min(end * work.most(), work.s.norm.rows) - (end - 1) * work.most();  // rows of the last tile
    const int64_t deep = (end - begin - 1) * steps + weft::tiles::steps(left);
    all_of(workers, [&](int worker) {
      const typename Tiled::Unit unit;
      last.multiply(deep, to.last, begin > 0, worker, workers);
      first.multiply(deep, to.first, begin > 0, worker, workers);
    });
  }
  const auto summed = [&](float* at, int64_t n, int64_t from) {
    std::fill(at, at + n, 0.0f);
    for (int64_t tile = 0; tile < work.count; tile++) add(sums + tile * few + from, at, n);
  };
  summed(to.first_bias, work.wide, 0), summed(to.last_bias, work.dim, work.wide);
  summed(to.norm, 2 * work.dim, work.wide + work.dim);
}
#endif

}  // namespace sublayers

// The whole of a sub-layer, by several threads.
template <class T, class E>
inline void sublayer(const Sublayer& s, bool back, int threads) {
  sublayers::Work<T, E> work(s, back);
  const int workers = int(std::max<int64_t>(1, std::min<int64_t>(threads, work.count)));
  back ? sublayers::backward(work, workers) : sublayers::forward(work, workers);
}

}  // namespace weft
