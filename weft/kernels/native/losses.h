// Cross entropy of logits, row by row, while a row is near: the losses, and in place of the logits their gradients.
#pragma once

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

inline float top(const float* z, int64_t n) {
  Floats tops = all(-INFINITY);
  float most = -INFINITY;
  each(n, [&](auto at) {
    const auto x = at.get(z);
    if constexpr (sizeof(x) == sizeof(Floats))
      tops = larger(x, tops);
    else
      most = std::fmax(most, x);
  });
  return std::fmax(most, largest(tops));
}

inline float exp(float x) { return std::exp(x); }

// What a row of logits costs: −log p of the target, and the same with smoothing.
struct Cost {
  float plain, smooth;
};

// A row of logits, which becomes e^z; the largest stands for e^0. Then p is by · e^z.
struct Row {
  float by, log_sum;
  Cost cost;

  Row(float* z, int64_t n, int64_t target, float smoothing) {
    const float high = top(z, n), wanted = z[target];
    const float mean = smoothing > 0.0f ? total(n, [&](auto at) { return at.get(z); }) / float(n) : wanted;
    const float sum = total(n, [&](auto at) {
      const auto e = exp(at.get(z) - high);
      at.put(z, e);
      return e;
    });
    by = 1.0f / sum;
    log_sum = high + std::log(sum);
    cost = {log_sum - wanted, log_sum - (wanted + smoothing * (mean - wanted))};
  }
};

// A row of logits as floats: itself, or of bf16 a copy, which `done` rounds back into its place.
struct Wide {
  static float* of(float* z, int64_t, std::vector<float>&) { return z; }
  static float* of(const bf16* z, int64_t n, std::vector<float>& room) {
    room.resize(n);
    each(n, [&](auto at) { at.put(room.data(), at.get(z)); });
    return room.data();
  }
  static void done(float*, const float*, int64_t) {}
  static void done(bf16* z, const float* row, int64_t n) {
    each(n, [&](auto at) { at.put(z, at.get(row)); });
  }
};

// z [rows, n] becomes its own gradient, if so wanted; costs [rows].
template <class T>
inline void cross_entropy(T* logits, int64_t rows, int64_t n, const int64_t* targets, float smoothing, bool train,
                          Cost* costs) {
  std::vector<float> room;
  const float spread = smoothing / float(n);
  for (int64_t r = 0; r < rows; r++, logits += n) {
    float* z = Wide::of(logits, n, room);
    const Row row(z, n, targets[r], smoothing);
    costs[r] = row.cost;
    if (!train) continue;
    each(n, [&](auto at) { at.put(z, at.get(z) * row.by - spread); });
    z[targets[r]] -= 1.0f - smoothing;
    Wide::done(logits, z, n);
  }
}

// Of the rows of two passes the mean of both costs, and how far p and q are apart: divergences [rows]; the formulas are
// in kernels/cross_entropy.py.
template <class T>
inline void rdrop(T* first, T* second, int64_t rows, int64_t n, const int64_t* targets, float smoothing, float apart,
                  bool train, Cost* costs, float* divergences) {
  std::vector<float> gap(n);  // log p − log q
  std::vector<float> room, more_room;
  const float half = apart / 2, spread = smoothing / 2 / float(n);
  for (int64_t r = 0; r < rows; r++, first += n, second += n) {
    float *z = Wide::of(first, n, room), *y = Wide::of(second, n, more_room), *ratio = gap.data();
    each(n, [&](auto at) { at.put(ratio, at.get(z) - at.get(y)); });
    const Row one(z, n, targets[r], smoothing), two(y, n, targets[r], smoothing);
    costs[r] = {(one.cost.plain + two.cost.plain) / 2, (one.cost.smooth + two.cost.smooth) / 2};
    const float between = two.log_sum - one.log_sum;
    const float forward = one.by * total(n, [&](auto at) { return at.get(z) * (at.get(ratio) + between); });
    const float backward = -two.by * total(n, [&](auto at) { return at.get(y) * (at.get(ratio) + between); });
    divergences[r] = (forward + backward) / 2;
    if (!train) continue;
    const float of_p = (1 + apart * (1 - forward)) / 2, of_q = (1 + apart * (1 - backward)) / 2;
    each(n, [&](auto at) {
      const auto p = at.get(z) * one.by, q = at.get(y) * two.by, by = (at.get(ratio) + between) * half;
      at.put(z, p * (by + of_p) - q * half - spread);
      at.put(y, q * (of_q - by) - p * half - spread);
    });
    z[targets[r]] -= (1.0f - smoothing) / 2;
    y[targets[r]] -= (1.0f - smoothing) / 2;
    Wide::done(first, z, n);
    Wide::done(second, y, n);
  }
}

}  // namespace weft
