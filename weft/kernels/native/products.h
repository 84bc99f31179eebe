// Vectors of floats, and products with matrices that were packed once.
//
// Every number of a product is one sum over the depth, from its first term to its last, whatever stands beside it: a
// row has the same bits in any company, at any place, and with any number of threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
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

inline Floats load(const bf16* at) {
#if defined(WEFT_AVX2)
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
#else
  const Words wide = __builtin_convertvector(*reinterpret_cast<const Halves*>(at), Words) << 16;
  return reinterpret_cast<const Floats&>(wide);
#endif
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

// f(at) for n numbers, by whole vectors and then one by one; at.get and at.put read and write them.
struct Whole {
  int64_t i;
  Floats get(const float* x) const { return load(x + i); }
  void put(float* x, Floats y) const { store(x + i, y); }
};
struct One {
  int64_t i;
  float get(const float* x) const { return x[i]; }
  void put(float* x, float y) const { x[i] = y; }
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
struct Matrix {
  const void* panels;
  const float* scale;
  const float* bias;
  int32_t in, out, kind;
};
enum Kind { FLOAT, BF16, INT8 };

inline int64_t panels(int64_t out) { return (out + WIDE - 1) / WIDE; }
inline int64_t deep(int64_t in, int kind) { return kind == INT8 ? in + in % 2 : in; }

// Where in its panels the weight of an output and an input is.
inline int64_t place(int64_t out, int64_t k, int64_t in, int kind) {
  const int64_t panel = out / WIDE * WIDE * deep(in, kind), column = out % WIDE;
  return panel + (kind == INT8 ? (k / 2 * WIDE + column) * 2 + k % 2 : k * WIDE + column);
}

inline void pack(const char* weight, char* packed, int64_t out, int64_t in, int kind) {
  const int64_t size = kind == FLOAT ? 4 : kind == BF16 ? 2 : 1;
  std::memset(packed, 0, panels(out) * WIDE * deep(in, kind) * size);
  for (int64_t row = 0; row < out; row++)
    for (int64_t k = 0; k < in; k++)
      std::memcpy(packed + place(row, k, in, kind) * size, weight + (row * in + k) * size, size);
}

// What becomes of a product: it is written, or added to what is there.
enum Put { WRITE, ADD };

// What is done with sums [rows, width], the first of which is of this column.
__attribute__((noinline)) inline void finish(const float* sums, int rows, int width, const Matrix& w, int column,
                                             float* c, int64_t stride, Put put) {
  const int real = w.out - column < width ? w.out - column : width;
  for (int r = 0; r < rows; r++, sums += width, c += stride)
    each(real, [&](auto at) {
      auto y = at.get(sums);
      if (w.scale) y *= at.get(w.scale + column);
      if (w.bias) y += at.get(w.bias + column);
      at.put(c, put == ADD ? at.get(c) + y : y);
    });
}

// The sums of M rows of a [·, depth] and P panels: [M, P · WIDE].
template <int M, int P, class W>
inline void products(const float* a, const float*, const W* b, int64_t depth, float* sums) {
  Floats total[M][2 * P] = {};
  for (int64_t k = 0; k < depth; k++, b += WIDE)
#pragma GCC unroll 16
    for (int q = 0; q < P; q++) {
      const Floats left = load(b + q * depth * WIDE), right = load(b + q * depth * WIDE + LANES);
#pragma GCC unroll 16
      for (int m = 0; m < M; m++) {
        const Floats x = all(a[m * depth + k]);
        total[m][2 * q] += x * left;
        total[m][2 * q + 1] += x * right;
      }
    }
#pragma GCC unroll 64
  for (int i = 0; i < M * 2 * P; i++) store(sums + i * LANES, total[i / (2 * P)][i % (2 * P)]);
}

// The same of whole numbers, each row of which has its scale.
template <int M, int P, class W>
inline void products(const int16_t* a, const float* scale, const W* b, int64_t depth, float* sums) {
  Ints total[M][2 * P] = {};
  for (int64_t k = 0; k < depth; k += 2, b += 2 * WIDE)
#pragma GCC unroll 16
    for (int q = 0; q < P; q++) {
      const Shorts left = load(b + q * depth * WIDE), right = load(b + q * depth * WIDE + WIDE);
#pragma GCC unroll 16
      for (int m = 0; m < M; m++) {
        int32_t two;
        std::memcpy(&two, a + m * depth + k, 4);
        const Shorts x = (Shorts)(two - Ints{});
        total[m][2 * q] = add_pairs(total[m][2 * q], x, left);
        total[m][2 * q + 1] = add_pairs(total[m][2 * q + 1], x, right);
      }
    }
#pragma GCC unroll 64
  for (int i = 0; i < M * 2 * P; i++) {
    const Floats y = __builtin_convertvector(total[i / (2 * P)][i % (2 * P)], Floats);
    store(sums + i * LANES, y * scale[i / (2 * P)]);
  }
}

// M rows times panels begin to end. Few rows take several panels at once, since one alone would wait for its own sums.
template <int M, class A, class W>
inline void strip(const A* a, const float* scale, const Matrix& w, int begin, int end, float* c, int64_t stride,
                  Put put) {
  constexpr int MOST = M <= 1 ? 4 : M <= 2 ? 2 : 1;
  const int64_t depth = deep(w.in, w.kind);
  float sums[M * MOST * WIDE];
  int p = begin;
  const W* b = static_cast<const W*>(w.panels) + p * depth * WIDE;
  for (; p + MOST <= end; p += MOST, b += MOST * depth * WIDE) {
    products<M, MOST, W>(a, scale, b, depth, sums);
    finish(sums, M, MOST * WIDE, w, p * WIDE, c + (p - begin) * WIDE, stride, put);
  }
  for (; MOST > 1 && p < end; p++, b += depth * WIDE) {
    products<M, 1, W>(a, scale, b, depth, sums);
    finish(sums, M, WIDE, w, p * WIDE, c + (p - begin) * WIDE, stride, put);
  }
}

template <int M, class A, class W>
inline void rest(int rows, const A* a, const float* scale, const Matrix& w, int begin, int end, float* c,
                 int64_t stride, Put put) {
  if constexpr (M > 0) {
    if (rows == M)
      strip<M, A, W>(a, scale, w, begin, end, c, stride, put);
    else
      rest<M - 1, A, W>(rows, a, scale, w, begin, end, c, stride, put);
  }
}

template <class A, class W>
void multiply_as(const A* a, const float* scale, int rows, const Matrix& w, int begin, int end, float* c,
                 int64_t stride, Put put) {
  const int64_t depth = deep(w.in, w.kind), near = std::max<int64_t>(1, (1 << 19) / (depth * sizeof(A) * TALL)) * TALL;
  if (rows > near)  // as many rows as stay in the cache while panels pass by
    return multiply_as<A, W>(a, scale, int(near), w, begin, end, c, stride, put),
           multiply_as<A, W>(a + near * depth, scale ? scale + near : nullptr, rows - int(near), w, begin, end,
                             c + near * stride, stride, put);
  if (rows < TALL) return rest<TALL - 1, A, W>(rows, a, scale, w, begin, end, c, stride, put);
  for (int p = begin; p < end; p++, c += WIDE) {  // a panel stays nearer still while rows pass by
    int r = 0;
    for (; r + TALL <= rows; r += TALL)
      strip<TALL, A, W>(a + r * depth, scale ? scale + r : nullptr, w, p, p + 1, c + r * stride, stride, put);
    rest<TALL - 1, A, W>(rows - r, a + r * depth, scale ? scale + r : nullptr, w, p, p + 1, c + r * stride, stride,
                         put);
  }
}

// Each row of x [rows, in] as whole numbers and a scale; as large as sums of 32 bits allow.
inline void round(const float* x, int rows, int in, int16_t* y, float* scale) {
  const int depth = int(deep(in, INT8));
  const float limit = std::fmin(32767.0f, std::floor(2147483000.0f / (127.0f * depth)));
  for (int r = 0; r < rows; r++, x += in, y += depth) {
    float most = 0.0f, damaged = 0.0f;  // not a number if one of x is none
    Floats top = {}, damages = {};
    each(in, [&](auto at) {
      const auto v = at.get(x);
      if constexpr (sizeof(v) == sizeof(Floats)) {
        top = larger(v < 0 ? -v : v, top);
        damages += v * 0.0f;
      } else {
        most = std::fmax(most, std::fabs(v));
        damaged += v * 0.0f;
      }
    });
    most = std::fmax(most, largest(top));
    const float by = most > 0.0f ? limit / most : 0.0f;
    scale[r] = most / limit + damaged + sum(damages);
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

// c [rows, ·] = a [rows, in] Wᵀ + bias, or added to c; of panels begin to end, written from c's first column on.
__attribute__((noinline)) inline void multiply(const float* a, int rows, const Matrix& w, float* c, int64_t stride,
                                               Put put, int begin, int end) {
  if (w.kind == FLOAT) multiply_as<float, float>(a, nullptr, rows, w, begin, end, c, stride, put);
  if (w.kind == BF16) multiply_as<float, bf16>(a, nullptr, rows, w, begin, end, c, stride, put);
  if (w.kind == INT8) {
    static thread_local std::vector<int16_t> whole;
    static thread_local std::vector<float> scale;
    whole.resize(rows * deep(w.in, INT8));
    scale.resize(rows);
    round(a, rows, w.in, whole.data(), scale.data());
    multiply_as<int16_t, int8_t>(whole.data(), scale.data(), rows, w, begin, end, c, stride, put);
  }
}

inline void multiply(const float* a, int rows, const Matrix& w, float* c, int64_t stride, Put put = WRITE) {
  multiply(a, rows, w, c, stride, put, 0, int(panels(w.out)));
}

}  // namespace weft
