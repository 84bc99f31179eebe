// Cross entropy of logits, row by row, while a row is near: the losses, and in place of the logits their gradients.
#pragma once

#include "memory.h"
#include "products.h"
#include "threads.h"

namespace weft {

// Σ f(at) over n numbers, of vectors and of single ones.
template <class F>
inline float total(int64_t n, F f) {
  Floats sums = {};
  float rest = 0.0f;
  each(n, [&](auto at) {
    const auto x = f(at);
    if constexpr (sizeof(x) == sizeof(Floats))
      sums += x;
    else
      rest += x;
  });
  return sum(sums) + rest;
}

inline float exp(float x) { return std::exp(x); }

// What a row of logits costs: −log p of the target, and the same with smoothing.
struct Cost {
  float plain, smooth;
};

// A row of logits z, of which e is made: e^z, where the largest stands for e^0. Then p is by · e. z may be e.
struct Row {
  float by, log_sum;
  Cost cost;

  template <class T>
  Row(const T* z, float* e, int64_t n, int64_t target, float smoothing) {
    Floats tops = all(-INFINITY);
    float most = -INFINITY;
    const float wanted = One{target}.get(z), all_z = total(n, [&](auto at) {
      const auto x = at.get(z);
      if constexpr (sizeof(x) == sizeof(Floats))
        tops = larger(x, tops);
      else
        most = std::fmax(most, x);
      return x;
    });
    const float high = std::fmax(most, largest(tops)), mean = smoothing > 0.0f ? all_z / float(n) : wanted;
    const float all_e = total(n, [&](auto at) {
      const auto x = exp(at.get(z) - high);
      at.put(e, x);
      return x;
    });
    by = 1.0f / all_e;
    log_sum = high + std::log(all_e);
    cost = {log_sum - wanted, log_sum - (wanted + smoothing * (mean - wanted))};
  }
};

// Room for a row of floats: the row itself, if it is of floats, else `room`.
inline float* wide(float* z, int64_t, std::vector<float>&) { return z; }
inline float* wide(bf16*, int64_t n, std::vector<float>& room) {
  at_least(room, n);
  return room.data();
}
inline void put_back(float*, const float*, int64_t) {}
inline void put_back(bf16* z, const float* room, int64_t n) {
  each(n, [&](auto at) { at.put(z, at.get(room)); });
}

// z [rows, n] becomes its own gradient, if so wanted; costs [rows].
// `apart` numbers from one row to the next.
template <class T>
inline void cross_entropy(T* z, int64_t rows, int64_t n, int64_t apart, const int64_t* targets, float smoothing,
                          bool train, Cost* costs) {
  std::vector<float> room;
  const float spread = smoothing / float(n);
  for (int64_t r = 0; r < rows; r++, z += apart) {
    float* e = wide(z, n, room);
    const Row row(z, e, n, targets[r], smoothing);
    costs[r] = row.cost;
    if (!train) continue;
    const float wanted = e[targets[r]] * row.by - spread - (1.0f - smoothing);
    each(n, [&](auto at) { at.put(z, at.get(e) * row.by - spread); });
    One{targets[r]}.put(z, wanted);
  }
}

// Of the rows of two passes the mean of both costs, and how far p and q are apart: divergences [rows], of this weight;
// the formulas are in kernels/cross_entropy.py.
template <class T>
inline void rdrop(T* z, T* y, int64_t rows, int64_t n, int64_t apart, const int64_t* targets, float smoothing,
                  float weight, bool train, Cost* costs, float* divergences) {
  std::vector<float> gap(n);  // log p − log q
  std::vector<float> room, more_room;
  const float half = weight / 2, spread = smoothing / 2 / float(n);
  for (int64_t r = 0; r < rows; r++, z += apart, y += apart) {
    float *e = wide(z, n, room), *f = wide(y, n, more_room), *ratio = gap.data();
    each(n, [&](auto at) { at.put(ratio, at.get(z) - at.get(y)); });
    const Row one(z, e, n, targets[r], smoothing), two(y, f, n, targets[r], smoothing);
    costs[r] = {(one.cost.plain + two.cost.plain) / 2, (one.cost.smooth + two.cost.smooth) / 2};
    const float between = two.log_sum - one.log_sum;
    const float forward = one.by * total(n, [&](auto at) { return at.get(e) * (at.get(ratio) + between); });
    const float backward = -two.by * total(n, [&](auto at) { return at.get(f) * (at.get(ratio) + between); });
    divergences[r] = (forward + backward) / 2;
    if (!train) continue;
    const float of_p = (1 + weight * (1 - forward)) / 2, of_q = (1 + weight * (1 - backward)) / 2;
    each(n, [&](auto at) {
      const auto p = at.get(e) * one.by, q = at.get(f) * two.by, by = (at.get(ratio) + between) * half;
      at.put(e, p * (by + of_p) - q * half - spread);
      at.put(f, q * (of_q - by) - p * half - spread);
    });
    e[targets[r]] -= (1.0f - smoothing) / 2;
    f[targets[r]] -= (1.0f - smoothing) / 2;
    put_back(z, e, n);
    put_back(y, f, n);
  }
}

}  // namespace weft
