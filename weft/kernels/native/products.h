// Vectors of floats, and products with matrices that were packed once.
//
// Every number of a product is one sum over the depth, from its first term to its last, or of whole numbers without
// rounding, whatever stands beside it: a row has the same bits in any company, at any place, and with any number of
// threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <utility>
#include <vector>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace weft {

// Floats of a vector; rows of a tile, as many as there are registers for.
#if defined(__AVX512F__) && defined(__AVX512BW__)
#define WEFT_AVX512
constexpr int LANES = 16, TALL = 12;
#elif defined(__AVX2__)
#define WEFT_AVX2
constexpr int LANES = 8, TALL = 6;
#else
constexpr int LANES = 4, TALL = 8;
#endif
constexpr int WIDE = 2 * LANES;  // columns of a panel

#define WEFT_VECTOR(type, count) __attribute__((vector_size(sizeof(type) * (count)), aligned(sizeof(type)), may_alias))
typedef float Floats WEFT_VECTOR(float, LANES);
typedef int32_t Ints WEFT_VECTOR(int32_t, LANES);
typedef uint32_t Words WEFT_VECTOR(uint32_t, LANES);
typedef uint16_t Halves WEFT_VECTOR(uint16_t, LANES);
typedef int16_t Shorts WEFT_VECTOR(int16_t, WIDE);
typedef int8_t Bytes WEFT_VECTOR(int8_t, WIDE);
typedef float Four WEFT_VECTOR(float, 4);

struct bf16 {
  uint16_t bits;
};

inline Floats load(const float* at) { return *reinterpret_cast<const Floats*>(at); }
inline void store(float* at, Floats x) { *reinterpret_cast<Floats*>(at) = x; }
inline Floats all(float x) { return x - Floats{}; }
// The larger of two; b where one is no number.
inline Floats larger(Floats a, Floats b) {
#if defined(WEFT_AVX512)  // here and below: what compilers make poor code of
  return _mm512_max_ps(a, b);
#elif defined(WEFT_AVX2)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

inline float root(float x) { return std::sqrt(x); }
inline Floats root(Floats x) {
#if defined(WEFT_AVX512)
  return _mm512_sqrt_ps(x);
#elif defined(WEFT_AVX2)
  return _mm256_sqrt_ps(x);
#else
  for (int i = 0; i < LANES; i++) x[i] = std::sqrt(x[i]);
  return x;
#endif
}

inline Floats load(const bf16* at) {
#if defined(WEFT_AVX2)
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
#else
  const Words wide = __builtin_convertvector(*reinterpret_cast<const Halves*>(at), Words) << 16;
  return reinterpret_cast<const Floats&>(wide);
#endif
}

// Rounded to the nearest, to even between two; what is no number stays none.
inline void store(bf16* at, Floats x) {
#if defined(WEFT_AVX512) && defined(__AVX512BF16__)
  const __m256bh narrow = _mm512_cvtneps_pbh(x);
  std::memcpy(at, &narrow, sizeof(narrow));
  return;
#endif
  const Words bits = reinterpret_cast<const Words&>(x);
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Halves halves = __builtin_convertvector((Words)(x != x) ? (bits >> 16) | 0x40 : rounded, Halves);
  *reinterpret_cast<Halves*>(at) = halves;
}
inline float widen(bf16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}
inline bf16 narrow(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return {uint16_t(x != x ? (bits >> 16) | 0x40 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

inline Shorts load(const int8_t* at) {
#if defined(WEFT_AVX512)
  return (Shorts)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
#elif defined(WEFT_AVX2)
  return (Shorts)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
#else
  return __builtin_convertvector(*reinterpret_cast<const Bytes*>(at), Shorts);
#endif
}

// What stands in four bytes, in every place.
inline Ints alike(const void* four) {
  int32_t x;
  std::memcpy(&x, four, 4);
  return x - Ints{};
}

// total + the sum of each two neighbours of a · b.
inline Ints add_pairs(Ints total, Shorts a, Shorts b) {
#if defined(WEFT_AVX512) && defined(__AVX512VNNI__)
  return (Ints)_mm512_dpwssd_epi32((__m512i)total, (__m512i)a, (__m512i)b);
#elif defined(WEFT_AVX512)
  return total + (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(WEFT_AVX2)
  return total + (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  for (int i = 0; i < LANES; i++) total[i] += int32_t(a[2 * i]) * b[2 * i] + int32_t(a[2 * i + 1]) * b[2 * i + 1];
  return total;
#endif
}

// total + the sum of each four neighbours of w · x: w unsigned, x signed and at most 64, so that two products fit 16
// bits.
inline Ints add_fours(Ints total, Ints w, Ints x) {
#if defined(WEFT_AVX512) && defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)total, (__m512i)w, (__m512i)x);
#elif defined(WEFT_AVX512)
  const __m512i pairs = _mm512_maddubs_epi16((__m512i)w, (__m512i)x);
  return total + (Ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(WEFT_AVX2)
  const __m256i pairs = _mm256_maddubs_epi16((__m256i)w, (__m256i)x);
  return total + (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
  const auto& a = reinterpret_cast<const uint8_t (&)[4 * LANES]>(w);
  const auto& b = reinterpret_cast<const int8_t (&)[4 * LANES]>(x);
  for (int i = 0; i < 4 * LANES; i++) total[i / 4] += int32_t(a[i]) * b[i];
  return total;
#endif
}

// The same of two of each, where four products fit 16 bits too (see `tame`): three multiplications instead of four.
inline Ints add_eights(Ints total, Ints w, Ints x, Ints v, Ints y) {
#if defined(WEFT_AVX2)
  const __m256i one = _mm256_maddubs_epi16((__m256i)w, (__m256i)x), two = _mm256_maddubs_epi16((__m256i)v, (__m256i)y);
  return total + (Ints)_mm256_madd_epi16(_mm256_add_epi16(one, two), _mm256_set1_epi16(1));
#elif defined(WEFT_AVX512) && !defined(__AVX512VNNI__)
  const __m512i one = _mm512_maddubs_epi16((__m512i)w, (__m512i)x), two = _mm512_maddubs_epi16((__m512i)v, (__m512i)y);
  return total + (Ints)_mm512_madd_epi16(_mm512_add_epi16(one, two), _mm512_set1_epi16(1));
#else
  return add_fours(add_fours(total, w, x), v, y);
#endif
}

// f(at) for n numbers, by whole vectors and then one by one; at.get and at.put read and write them.
struct Whole {
  int64_t i;
  template <class T>
  Floats get(const T* x) const { return load(x + i); }
  template <class T>
  void put(T* x, Floats y) const { store(x + i, y); }
};
struct One {
  int64_t i;
  float get(const float* x) const { return x[i]; }
  float get(const bf16* x) const { return widen(x[i]); }
  void put(float* x, float y) const { x[i] = y; }
  void put(bf16* x, float y) const { x[i] = narrow(y); }
};
template <class F>
inline void each(int64_t n, F f) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) f(Whole{i});
  for (; i < n; i++) f(One{i});
}

// f of all numbers of a vector, two by two.
template <class F>
inline float folded(Floats x, F f) {
  const union {
    Floats whole;
    Four part[LANES / 4];
  } y = {x};
  Four z = y.part[0];
  for (int i = 1; i < LANES / 4; i++) z = f(z, y.part[i]);
  return f(f(z[0], z[2]), f(z[1], z[3]));
}

inline float sum(Floats x) {
  return folded(x, [](auto a, auto b) { return a + b; });
}

inline float largest(Floats x) {
  return folded(x, [](auto a, auto b) { return a > b ? a : b; });
}

inline bool any(Ints x) {
#if defined(WEFT_AVX2)
  return _mm256_movemask_ps((__m256)x) != 0;
#endif
  const union {
    Ints whole;
    int64_t part[LANES / 2];
  } y = {x};
  int64_t z = 0;
  for (int i = 0; i < LANES / 2; i++) z |= y.part[i];
  return z != 0;
}

// Of a and b every other `half` numbers: those of a, and where a has the others, those of b; from `first` on.
template <int half, int first, int... i>
inline Floats mixed(Floats a, Floats b, std::integer_sequence<int, i...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, (i & half ? LANES + i - half + first : i + first)...);
#else
  return __builtin_shuffle(a, b, Ints{(i & half ? LANES + i - half + first : i + first)...});
#endif
}

// A square of LANES vectors, turned over its diagonal: halves of it change places, halves of these, and so on.
template <int half = LANES / 2>
inline void turn(Floats* square) {
  constexpr std::make_integer_sequence<int, LANES> places;
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++) {
    if (i & half) continue;
    const Floats one = square[i], two = square[i + half];
    square[i] = mixed<half, 0>(one, two, places);
    square[i + half] = mixed<half, half>(one, two, places);
  }
  if constexpr (half > 1) turn<half / 2>(square);
}

// e^x to about 1e-7 of it, for −87 ≤ x ≤ 88; what is below counts as −87. No number stays none.
inline Floats exp(Floats x) {
  x = larger(all(-87.3f), x);
  const Floats magic = all(12582912.0f), shifted = x * 1.44269504f + magic;  // 1.5 · 2^23: what is below 1 falls off
  const Floats whole = shifted - magic;
  x = x - whole * 0.693359375f + whole * 2.12194440e-4f;  // what is left of x after n ln 2, in two steps
  Floats y = all(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    y = y * x + c;
  y = y * x * x + x + 1.0f;
  const Ints power = (reinterpret_cast<const Ints&>(shifted) << 23) + (127 << 23);
  return y * reinterpret_cast<const Floats&>(power);
}

// A linear layer. Its weight [out, in] is packed in panels of WIDE outputs, the last filled up with zeros:
//   FLOAT, BF16   [in][WIDE]
//   INT8          [in / 2][WIDE][2]; each output has its scale. Inputs are rounded to 16 bits, and the sums are exact.
//   COARSE        [in / 4][WIDE][4], 128 more than the weights; the same with inputs from −64 to 64.
struct Matrix {
  const void* panels;
  const float* scale;
  const float* bias;
  int32_t in, out, kind;
};
enum Kind { FLOAT, BF16, INT8, COARSE };

constexpr int EIGHT = 8;  // inputs of COARSE that are multiplied together

inline int64_t panels(int64_t out) { return (out + WIDE - 1) / WIDE; }
inline int64_t together(int kind) { return kind == COARSE ? 4 : kind == INT8 ? 2 : 1; }  // inputs of one output
inline int64_t deep(int64_t in, int kind) {
  const int64_t some = kind == COARSE ? EIGHT : together(kind);
  return (in + some - 1) / some * some;
}
inline int64_t size(int kind) { return kind == FLOAT ? 4 : kind == BF16 ? 2 : 1; }

// Where in its panels the weight of an output and an input is.
inline int64_t place(int64_t out, int64_t k, int64_t in, int kind) {
  const int64_t panel = out / WIDE * WIDE * deep(in, kind), column = out % WIDE, some = together(kind);
  return panel + (k / some * WIDE + column) * some + k % some;
}

inline void pack(const char* weight, char* packed, int64_t out, int64_t in, int kind) {
  const int64_t bytes = size(kind);
  std::memset(packed, 0, panels(out) * WIDE * deep(in, kind) * bytes);
  for (int64_t row = 0; row < out; row++)
    for (int64_t k = 0; k < in; k++)
      std::memcpy(packed + place(row, k, in, kind) * bytes, weight + (row * in + k) * bytes, bytes);
  for (int64_t i = 0; kind == COARSE && i < panels(out) * WIDE * deep(in, kind); i++) packed[i] ^= char(0x80);
}

// What becomes of a product: it is written, added to what is there, or written where it is above 0, and else 0.
enum Put { WRITE, ADD, POSITIVE };

// Rows [·, depth] to be multiplied; whole numbers stand for number · scale.
template <class A>
struct Rows {
  const A* at;
  const float* scale;
  const int32_t* start;  // of COARSE: what a row's sums begin with, since its weights are 128 too large
  const int32_t* wild;   // of COARSE: the eights that are not tame, for each TALL rows; behind them depth / EIGHT

  Rows from(int64_t row, int64_t depth) const {
    return {at + row * depth, scale ? scale + row : nullptr, start ? start + row : nullptr,
            wild ? wild + row / TALL * (depth / EIGHT + 1) : nullptr};
  }
};

// Where a product goes: c [·, stride], whose first column is number `first` of the matrix.
struct Target {
  const Matrix& w;
  float* c;
  int64_t stride;
  Put put;
  int first;

  Target below(int rows) const { return {w, c + rows * stride, stride, put, first}; }

  // The sums of M rows, y(m) of row m, from this column on. A number is put by the same instructions in any company.
  template <int M, class F>
  __attribute__((always_inline)) void take(int column, F y) const {
    const int real = w.out - column;
    float* to = c + column - first;
    if (real >= LANES)
      return finish<M>(y, w.scale ? load(w.scale + column) : all(1.0f), w.bias ? load(w.bias + column) : Floats{}, to,
                       stride);
    for (int m = 0; m < M && real > 0; m++) take_few(column, real, y(m), to + m * stride);
  }

 private:
  template <int M, class F>
  __attribute__((always_inline)) void finish(F y, Floats by, Floats bias, float* to, int64_t apart) const {
    const auto each_row = [&](auto f) {
#pragma GCC unroll 16
      for (int m = 0; m < M; m++) store(to + m * apart, f(y(m) * by + bias, to + m * apart));
    };
    if (put == WRITE) each_row([](Floats x, const float*) { return x; });
    if (put == ADD) each_row([](Floats x, const float* at) { return load(at) + x; });
    if (put == POSITIVE) each_row([](Floats x, const float*) { return x < 0 ? Floats{} : x; });  // no number stays none
  }

  __attribute__((noinline)) void take_few(int column, int real, Floats y, float* to) const {
    float scale[LANES], bias[LANES], few[LANES] = {};
    for (int i = 0; i < LANES; i++) {
      scale[i] = w.scale && i < real ? w.scale[column + i] : 1.0f;
      bias[i] = w.bias && i < real ? w.bias[column + i] : 0.0f;
    }
    std::copy_n(to, real, few);
    finish<1>([&](int) { return y; }, load(scale), load(bias), few, 0);
    std::copy_n(few, real, to);
  }
};

// M rows times P panels, which begin with this column.
template <int M, int P, class W>
inline void products(const Rows<float>& a, const W* b, int64_t depth, const Target& target, int column) {
  Floats total[2 * P][M] = {};
  for (int64_t k = 0; k < depth; k++, b += WIDE)
#pragma GCC unroll 16
    for (int q = 0; q < P; q++) {
      const Floats left = load(b + q * depth * WIDE), right = load(b + q * depth * WIDE + LANES);
#pragma GCC unroll 16
      for (int m = 0; m < M; m++) {
        const Floats x = all(a.at[m * depth + k]);
        total[2 * q][m] += x * left;
        total[2 * q + 1][m] += x * right;
      }
    }
#pragma GCC unroll 16
  for (int i = 0; i < 2 * P; i++) target.take<M>(column + i * LANES, [&](int m) { return total[i][m]; });
}

template <int M, int P, class W>
inline void products(const Rows<int16_t>& a, const W* b, int64_t depth, const Target& target, int column) {
  Ints total[2 * P][M] = {};
  for (int64_t k = 0; k < depth; k += 2, b += 2 * WIDE)
#pragma GCC unroll 16
    for (int q = 0; q < P; q++) {
      const Shorts left = load(b + q * depth * WIDE), right = load(b + q * depth * WIDE + WIDE);
#pragma GCC unroll 16
      for (int m = 0; m < M; m++) {
        const Shorts x = (Shorts)alike(a.at + m * depth + k);
        total[2 * q][m] = add_pairs(total[2 * q][m], x, left);
        total[2 * q + 1][m] = add_pairs(total[2 * q + 1][m], x, right);
      }
    }
#pragma GCC unroll 16
  for (int i = 0; i < 2 * P; i++)
    target.take<M>(column + i * LANES,
                   [&](int m) { return __builtin_convertvector(total[i][m], Floats) * a.scale[m]; });
}

template <int M, int P, class W>
inline void products(const Rows<int8_t>& a, const W* b, int64_t depth, const Target& target, int column) {
  Ints total[2 * P][M];
#pragma GCC unroll 16
  for (int i = 0; i < 2 * P * M; i++) total[i / M][i % M] = a.start[i % M] - Ints{};
  const int8_t* x = a.at;
  const auto eight = [&](auto add) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int q = 0; q < P; q++) {
      const Ints* w = reinterpret_cast<const Ints*>(b + q * depth * WIDE);
      const Ints left = w[0], right = w[1], lower_left = w[2], lower_right = w[3];
#pragma GCC unroll 16
      for (int m = 0; m < M; m++) {
        const Ints one = alike(x + m * depth), two = alike(x + m * depth + 4);
        total[2 * q][m] = add(total[2 * q][m], left, one, lower_left, two);
        total[2 * q + 1][m] = add(total[2 * q + 1][m], right, one, lower_right, two);
      }
    }
    x += EIGHT, b += EIGHT * WIDE;
  };
  const int32_t* wild = a.wild;
  for (int64_t at = 0;; at++) {
    for (const int64_t to = *wild++; at < to; at++) eight(add_eights);
    if (at == depth / EIGHT) break;
    eight([](Ints total, Ints w, Ints x, Ints v, Ints y) { return add_fours(add_fours(total, w, x), v, y); });
  }
#pragma GCC unroll 16
  for (int i = 0; i < 2 * P; i++)
    target.take<M>(column + i * LANES,
                   [&](int m) { return __builtin_convertvector(total[i][m], Floats) * a.scale[m]; });
}

// M rows times panels begin to end. Few rows take several panels at once, since one alone would wait for its own sums.
template <int M, class A, class W>
inline void strip(const Rows<A>& a, const Target& target, int begin, int end) {
  constexpr int MOST = M <= 1 ? 4 : M <= 2 ? 2 : 1;
  const Matrix& w = target.w;
  const int64_t depth = deep(w.in, w.kind);
  int p = begin;
  const W* b = static_cast<const W*>(w.panels) + p * depth * WIDE;
  for (; p + MOST <= end; p += MOST, b += MOST * depth * WIDE) products<M, MOST, W>(a, b, depth, target, p * WIDE);
  for (; MOST > 1 && p < end; p++, b += depth * WIDE) products<M, 1, W>(a, b, depth, target, p * WIDE);
}

template <int M, class A, class W>
inline void rest(int rows, const Rows<A>& a, const Target& target, int begin, int end) {
  if constexpr (M > 0) {
    if (rows == M)
      strip<M, A, W>(a, target, begin, end);
    else
      rest<M - 1, A, W>(rows, a, target, begin, end);
  }
}

template <class A, class W>
void multiply_as(const Rows<A>& a, int rows, const Target& target, int begin, int end) {
  const int64_t depth = deep(target.w.in, target.w.kind);
  const int near = int(std::max<int64_t>(1, (1 << 19) / (depth * sizeof(A) * TALL)) * TALL);
  if (rows > near)  // as many rows as stay in the cache while panels pass by
    return multiply_as<A, W>(a, near, target, begin, end),
           multiply_as<A, W>(a.from(near, depth), rows - near, target.below(near), begin, end);
  if (rows < TALL) return rest<TALL - 1, A, W>(rows, a, target, begin, end);
  for (int p = begin; p < end; p++) {  // a panel stays nearer still while rows pass by
    int r = 0;
    for (; r + TALL <= rows; r += TALL) strip<TALL, A, W>(a.from(r, depth), target.below(r), p, p + 1);
    rest<TALL - 1, A, W>(rows - r, a.from(r, depth), target.below(r), p, p + 1);
  }
}

// How far n numbers go below and above 0; `damaged` is no number if one of them is none, and else 0.
struct Span {
  float below = 0.0f, above = 0.0f, damaged = 0.0f;

  Span(const float* x, int n) {
    Floats low[4] = {}, high[4] = {}, damages[4] = {};
    int i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)  // four at a time, that none waits for the one before
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) {
        const Floats v = load(x + i + j * LANES);
        low[j] = larger(-v, low[j]);
        high[j] = larger(v, high[j]);
        damages[j] += v * 0.0f;
      }
    for (; i < n; i++) {
      below = std::fmax(below, -x[i]);
      above = std::fmax(above, x[i]);
      damaged += x[i] * 0.0f;
    }
    below = std::fmax(below, largest(larger(larger(low[0], low[1]), larger(low[2], low[3]))));
    above = std::fmax(above, largest(larger(larger(high[0], high[1]), larger(high[2], high[3]))));
    damaged += sum((damages[0] + damages[1]) + (damages[2] + damages[3]));
  }
};

// Each row of x [rows, in] as whole numbers and a scale; as large as sums of 32 bits allow.
inline void round(const float* x, int rows, int in, int16_t* y, float* scale) {
  const int depth = int(deep(in, INT8));
  const float limit = std::fmin(32767.0f, std::floor(2147483000.0f / (127.0f * depth)));
  for (int r = 0; r < rows; r++, x += in, y += depth) {
    const Span span(x, in);
    const float most = std::fmax(span.below, span.above), by = most > 0.0f ? limit / most : 0.0f;
    scale[r] = most / limit + span.damaged;
    int i = 0;
#if defined(WEFT_AVX2) || defined(WEFT_AVX512)
    for (; i + 8 <= in; i += 8) {
      const __m256i n = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), _mm256_set1_ps(by)));
      const __m128i both = _mm_packs_epi32(_mm256_castsi256_si128(n), _mm256_extracti128_si256(n, 1));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(y + i), both);
    }
#endif
    for (; i < in; i++) y[i] = int16_t(std::nearbyint(x[i] * by));
    for (; i < depth; i++) y[i] = 0;
  }
}

// Whether the sum of four products fits 16 bits, whatever the weights are: 0, 1, 4 and 5, and 2, 3, 6 and 7 of x.
inline bool tame(const int8_t* x) {
  for (int i = 0; i < 4; i += 2) {
    int above = 0, below = 0;
    for (int k : {i, i + 1, i + 4, i + 5}) above += std::max<int>(x[k], 0), below += std::max<int>(-x[k], 0);
    if (std::max(above, below) * 255 > 32767) return false;
  }
  return true;
}

// For each TALL rows of x [rows, depth], which eights are not tame in all of them, and behind these how many eights.
inline void find_wild(const int8_t* x, int rows, int64_t depth, int32_t* wild) {
  const int64_t eights = depth / EIGHT;
  for (int r = 0; r < rows; r += TALL, wild += eights + 1) {
    int32_t* next = wild;
    int64_t at = 0;
#if defined(WEFT_AVX2) || defined(WEFT_AVX512)
    for (; at + 4 <= eights; at += 4) {  // four eights at a time: nearly always all of them are tame
      __m256i most = _mm256_setzero_si256();
      for (int m = r; m < std::min(r + TALL, rows); m++) {
        const __m256i zero = _mm256_setzero_si256(), one = _mm256_set1_epi8(1);
        const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + m * depth + at * EIGHT));
        const __m256i above = _mm256_maddubs_epi16(_mm256_max_epi8(v, zero), one);
        const __m256i below = _mm256_maddubs_epi16(_mm256_max_epi8(_mm256_sub_epi8(zero, v), zero), one);
        most = _mm256_max_epi16(most, _mm256_add_epi16(above, _mm256_srli_epi64(above, 32)));
        most = _mm256_max_epi16(most, _mm256_add_epi16(below, _mm256_srli_epi64(below, 32)));
      }
      const int large = _mm256_movemask_epi8(_mm256_cmpgt_epi16(most, _mm256_set1_epi16(32767 / 255)));
      for (int i = 0; (large & 0x0f0f0f0f) && i < 4; i++)
        if (large >> 8 * i & 0x0f) *next++ = int32_t(at + i);
    }
#endif
    for (; at < eights; at++) {
      bool all_tame = true;
      for (int m = r; m < std::min(r + TALL, rows); m++) all_tame &= tame(x + m * depth + at * EIGHT);
      if (!all_tame) *next++ = int32_t(at);
    }
    *next = int32_t(eights);
  }
}

// Each row of x [rows, in] as whole numbers from −64 to 64 and a scale, and what its sums begin with.
inline void round(const float* x, int rows, int in, int8_t* y, float* scale, int32_t* start) {
  const int depth = int(deep(in, COARSE));
  for (int r = 0; r < rows; r++, x += in, y += depth) {
    const Span span(x, in);
    const float most = std::fmax(span.below, span.above), by = most > 1e-36f ? 64.0f / most : 0.0f;
    scale[r] = most / 64.0f + span.damaged;
    int i = 0;
    int32_t total = 0;
#if defined(WEFT_AVX2) || defined(WEFT_AVX512)
    __m256i totals = _mm256_setzero_si256();
    const auto eight = [&](int at) {
      const __m256i n = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + at), _mm256_set1_ps(by)));
      totals = _mm256_add_epi32(totals, n);
      return n;
    };
    for (; i + 32 <= in; i += 32) {
      const __m256i one = _mm256_packs_epi32(eight(i), eight(i + 8));
      const __m256i two = _mm256_packs_epi32(eight(i + 16), eight(i + 24));
      const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // within each half they are packed
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(y + i),
                          _mm256_permutevar8x32_epi32(_mm256_packs_epi16(one, two), order));
    }
    int32_t parts[8];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(parts), totals);
    for (int32_t part : parts) total += part;
#endif
    for (; i < in; i++) total += y[i] = int8_t(std::nearbyint(x[i] * by));
    for (; i < depth; i++) y[i] = 0;
    start[r] = -128 * total;
  }
}

// Inputs [rows, in] as products with a kind of matrix want them; valid until the thread makes others.
class Inputs {
 public:
  Inputs(const float* x, int rows, int in, int kind) : rows_(rows), x_{x, nullptr, nullptr, nullptr} {
    static thread_local std::vector<int16_t> shorts;
    static thread_local std::vector<int8_t> bytes;
    static thread_local std::vector<float> scale;
    static thread_local std::vector<int32_t> start, wild;
    const int64_t depth = deep(in, kind);
    if (kind == INT8 || kind == COARSE) scale.resize(rows);
    if (kind == INT8) {
      shorts.resize(rows * depth);
      round(x, rows, in, shorts.data(), scale.data());
    }
    if (kind == COARSE) {
      bytes.resize(rows * depth);
      start.resize(rows);
      wild.resize((rows + TALL - 1) / TALL * (depth / EIGHT + 1));
      round(x, rows, in, bytes.data(), scale.data(), start.data());
      find_wild(bytes.data(), rows, depth, wild.data());
    }
    shorts_ = {shorts.data(), scale.data(), nullptr, nullptr};
    bytes_ = {bytes.data(), scale.data(), start.data(), wild.data()};
  }

  // c [rows, ·] = x Wᵀ + bias, or as `put` says; of panels begin to end, written from c's first column on.
  __attribute__((noinline)) void multiply(const Matrix& w, float* c, int64_t stride, Put put, int begin,
                                          int end) const {
    const Target target{w, c, stride, put, begin * WIDE};
    if (w.kind == FLOAT) multiply_as<float, float>(x_, rows_, target, begin, end);
    if (w.kind == BF16) multiply_as<float, bf16>(x_, rows_, target, begin, end);
    if (w.kind == INT8) multiply_as<int16_t, int8_t>(shorts_, rows_, target, begin, end);
    if (w.kind == COARSE) multiply_as<int8_t, int8_t>(bytes_, rows_, target, begin, end);
  }

 private:
  int rows_;
  Rows<float> x_;
  Rows<int16_t> shorts_;
  Rows<int8_t> bytes_;
};

inline void multiply(const float* a, int rows, const Matrix& w, float* c, int64_t stride, Put put = WRITE) {
  Inputs(a, rows, w.in, w.kind).multiply(w, c, stride, put, 0, int(panels(w.out)));
}

}  // namespace weft
