// Passes over rows in training, and their gradients: norms, activations, dropout. What is read and written is float or
// bf16, what is summed is float. A number has the same bits whatever the threads.
#pragma once

#include <type_traits>

#include "activations.h"
#include "decisions.h"

namespace weft {
namespace rows {

// The last numbers of some, fewer than a vector has: zeros stand for the others.
struct Part {
  int64_t i, count;
  template <class T>
  Floats get(const T* x) const {
    float few[LANES] = {};
    for (int64_t j = 0; j < count; j++) few[j] = One{i + j}.get(x);
    return load(few);
  }
  template <class T>
  void put(T* x, Floats y) const {
    float few[LANES];
    store(few, y);
    for (int64_t j = 0; j < count; j++) One{i + j}.put(x, few[j]);
  }
};

// x where there are numbers, and 0 beyond the last of them.
inline Floats there(const Whole&, Floats x) { return x; }
inline Floats there(const Part& at, Floats x) {
  Ints places;
  for (int i = 0; i < LANES; i++) places[i] = i;
  return places < int32_t(at.count) ? x : Floats{};
}

// f(at) for n numbers, by vectors; at.get and at.put read and write them.
template <class F>
inline __attribute__((always_inline)) void vectors(int64_t n, F f) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) f(Whole{i});
  if (i < n) f(Part{i, n - i});
}

// What a row is: its mean (0 for a norm that takes none away), and what brings the rest to a variance of 1.
struct Spread {
  float mean, by;
};

template <class T>
inline Spread spread(const T* x, int64_t n, float eps, bool centred) {
  Floats sums = {}, squares = {};
  if (centred) vectors(n, [&](auto at) { sums += at.get(x); });
  const float mean = sum(sums) / float(n);
  vectors(n, [&](auto at) {
    const Floats far = there(at, at.get(x) - mean);
    squares += far * far;
  });
  return {mean, 1.0f / std::sqrt(sum(squares) / float(n) + eps)};
}

}  // namespace rows

// Rows [rows, n] and a norm of them: x → (x − mean) · by · weight + bias.
struct Norming {
  const void* x;
  const float* weight;
  const float* bias;      // may be null
  rows::Spread* spreads;  // [rows]
  int64_t rows, n;
  float eps;
  int32_t centred, narrow;
};

// If not `known`, the spreads of these rows are found and kept.
template <class T>
inline void normalise(const Norming& a, int64_t begin, int64_t end, T* y, bool known = false) {
  for (int64_t r = begin; r < end; r++) {
    const T* x = static_cast<const T*>(a.x) + r * a.n;
    T* to = y + r * a.n;
    if (!known) a.spreads[r] = rows::spread(x, a.n, a.eps, a.centred);
    const rows::Spread s = a.spreads[r];
    rows::vectors(a.n, [&](auto at) {
      const Floats z = (at.get(x) - s.mean) * s.by * at.get(a.weight);
      at.put(to, a.bias ? z + at.get(a.bias) : z);
    });
  }
}

// The gradient of x, from that of what came of it, plus `onto`, if that is not null; sums [2, n] take what these rows
// add to those of weight and bias.
template <class T>
inline void normalise_back(const Norming& a, int64_t begin, int64_t end, const T* grad, T* dx, float* sums,
                           const T* onto = nullptr) {
  std::fill(sums, sums + 2 * a.n, 0.0f);
  for (int64_t r = begin; r < end; r++) {
    const T *x = static_cast<const T*>(a.x) + r * a.n, *from = grad + r * a.n;
    T* to = dx + r * a.n;
    const rows::Spread s = a.spreads[r];
    Floats all_g = {}, all_gz = {};
    rows::vectors(a.n, [&](auto at) {
      const Floats g = at.get(from), gz = g * ((at.get(x) - s.mean) * s.by), weight = at.get(a.weight);
      at.put(sums, at.get(sums) + gz);
      at.put(sums + a.n, at.get(sums + a.n) + g);
      all_g += g * weight, all_gz += gz * weight;
    });
    const float mean_g = a.centred ? sum(all_g) / float(a.n) : 0.0f, mean_gz = sum(all_gz) / float(a.n);
    rows::vectors(a.n, [&](auto at) {
      const Floats z = (at.get(x) - s.mean) * s.by;
      const Floats d = (at.get(from) * at.get(a.weight) - mean_g - z * mean_gz) * s.by;
      at.put(to, onto ? d + at.get(onto + r * a.n) : d);
    });
  }
}

template <int F>
inline Floats applied(Floats x) { return F == RELU ? (x < 0 ? Floats{} : x) : activated(x, F); }

// f(a constant) for the activation of this number.
template <class F>
inline void with_activation(int activation, F f) {
  if (activation == RELU) f(std::integral_constant<int, RELU>());
  if (activation == GELU) f(std::integral_constant<int, GELU>());
  if (activation == GELU_TANH) f(std::integral_constant<int, GELU_TANH>());
  if (activation == SWIGLU) f(std::integral_constant<int, SWIGLU>());
}

// y = f(x), or f(x) · by, if that is not null.
template <int F, class T>
inline void activate(const T* x, const T* by, T* y, int64_t n) {
  rows::vectors(n, [&](auto at) {
    const Floats z = applied<F>(at.get(x));
    at.put(y, by ? z * at.get(by) : z);
  });
}

// The gradients of x and, if there is one, of `by`.
template <int F, class T>
inline void activate_back(const T* x, const T* by, const T* grad, T* dx, T* dby, int64_t n) {
  rows::vectors(n, [&](auto at) {
    const Floats in = at.get(x), g = at.get(grad), steep = slope(in, F);
    at.put(dx, by ? g * at.get(by) * steep : g * steep);
    if (by) at.put(dby, g * applied<F>(in));
  });
}

// to += x
template <class T>
inline void add(const T* x, float* to, int64_t n) {
  rows::vectors(n, [&](auto at) { at.put(to, at.get(to) + at.get(x)); });
}

// What dropout needs; see kernels/dropout.py.
struct Drop {
  uint64_t key;
  int64_t count;  // of all numbers
  int32_t bound;
  float kept;
};

// y = what is kept of x, times `kept`, plus `onto`, if that is not null: numbers from begin, which four divides, to end.
template <class T>
inline void drop(const Drop& a, const T* x, const T* onto, T* y, int64_t begin, int64_t end) {
  constexpr int64_t SOME = 2048;
  typedef int16_t Few WEFT_VECTOR(int16_t, LANES);
  int64_t words[SOME / 4 + 8 + LANES / 4];
  for (int64_t from = begin; from < end; from += SOME) {
    const int64_t n = std::min(SOME, end - from);
    decide(a.key, (a.count + 3) / 4, from / 4, (n + 3) / 4, words);
    const auto* bits = reinterpret_cast<const int16_t*>(words);
    rows::vectors(n, [&](auto at) {
      const Ints drawn = __builtin_convertvector(*reinterpret_cast<const Few*>(bits + at.i), Ints);
      const Floats z = drawn < a.bound ? at.get(x + from) * a.kept : Floats{};
      at.put(y + from, onto ? z + at.get(onto + from) : z);
    });
  }
}

}  // namespace weft
