// Additive attention (Bahdanau et al. 2015) of one query a row, and its gradients, for a decoder that comes once a token:
//
//     score_m = Σ energy · tanh(q + k_m),    w = softmax(score),    out = Σ w_m v_m
//
// A step needs the gradients of its query at once; those of keys, values and energy are made once for all steps.
#pragma once

#include "losses.h"
#include "rows.h"

namespace weft {

// All in float, without gaps. A row sees keys before lengths[b], if there are lengths.
struct Additive {
  int64_t rows, keys, dim, width;
  const float *k, *v, *energy;  // [rows, keys, dim], [rows, keys, width], [dim]
  const int64_t* lengths;
};

// What one step has: all are [rows, ·].
struct Look {
  const float* q;
  float* weights;     // [rows, keys]
  float* out;         // [rows, width]; in the backward pass its gradient
  float *slopes, *dq;  // of the backward pass: gradients of the scores [rows, keys] and of the query
};

namespace additive {

inline Floats tanh(Floats x) { return 1.0f - 2.0f / one_and_exp(-2.0f * x); }

inline int64_t real_keys(const Additive& a, int64_t row) {
  return a.lengths == nullptr ? a.keys : std::clamp<int64_t>(a.lengths[row], 0, a.keys);
}

}  // namespace additive

inline void look(const Additive& a, const Look& s, int64_t begin, int64_t end) {
  for (int64_t b = begin; b < end; b++) {
    const int64_t keys = additive::real_keys(a, b);
    const float *q = s.q + b * a.dim, *k = a.k + b * a.keys * a.dim, *v = a.v + b * a.keys * a.width;
    float *w = s.weights + b * a.keys, *out = s.out + b * a.width;
    float high = -INFINITY, all_w = 0.0f;
    for (int64_t m = 0; m < keys; m++) {
      Floats score = {};
      rows::vectors(a.dim, [&](auto at) {
        score += at.get(a.energy) * additive::tanh(at.get(q) + at.get(k + m * a.dim));  // energy is 0 beyond the last
      });
      high = std::fmax(high, w[m] = sum(score));
    }
    for (int64_t m = 0; m < keys; m++) all_w += w[m] = std::exp(w[m] - high);
    for (int64_t m = 0; m < keys; m++) w[m] /= all_w;
    std::fill(w + keys, w + a.keys, 0.0f);
    rows::vectors(a.width, [&](auto at) {
      Floats total = {};
      for (int64_t m = 0; m < keys; m++) total += w[m] * at.get(v + m * a.width);
      at.put(out, total);
    });
  }
}

inline void look_back(const Additive& a, const Look& s, int64_t begin, int64_t end) {
  for (int64_t b = begin; b < end; b++) {
    const int64_t keys = additive::real_keys(a, b);
    const float *q = s.q + b * a.dim, *k = a.k + b * a.keys * a.dim, *v = a.v + b * a.keys * a.width;
    const float *w = s.weights + b * a.keys, *grad = s.out + b * a.width;
    float *slopes = s.slopes + b * a.keys, *dq = s.dq + b * a.dim;
    float mean = 0.0f;
    for (int64_t m = 0; m < keys; m++) {
      Floats total = {};
      rows::vectors(a.width, [&](auto at) { total += at.get(grad) * at.get(v + m * a.width); });
      mean += w[m] * (slopes[m] = sum(total));
    }
    for (int64_t m = 0; m < keys; m++) slopes[m] = w[m] * (slopes[m] - mean);
    std::fill(slopes + keys, slopes + a.keys, 0.0f);
    rows::vectors(a.dim, [&](auto at) {
      const Floats here = at.get(q);
      Floats total = {};
      for (int64_t m = 0; m < keys; m++) {
        const Floats t = additive::tanh(here + at.get(k + m * a.dim));
        total += slopes[m] * (1.0f - t * t);
      }
      at.put(dq, at.get(a.energy) * total);
    });
  }
}

// The gradients of keys and values, and of energy [dim] those of these rows, from all steps.
inline void look_all(const Additive& a, const Look* steps, int64_t count, int64_t begin, int64_t end, float* dk,
                     float* dv, float* denergy) {
  std::fill(denergy, denergy + a.dim, 0.0f);
  for (int64_t b = begin; b < end; b++) {
    const int64_t keys = additive::real_keys(a, b);
    const float* k = a.k + b * a.keys * a.dim;
    float *to_k = dk + b * a.keys * a.dim, *to_v = dv + b * a.keys * a.width;
    std::fill(to_k + keys * a.dim, to_k + a.keys * a.dim, 0.0f);
    std::fill(to_v + keys * a.width, to_v + a.keys * a.width, 0.0f);
    for (int64_t m = 0; m < keys; m++) {
      rows::vectors(a.width, [&](auto at) {
        Floats total = {};
        for (int64_t n = 0; n < count; n++)
          total += steps[n].weights[b * a.keys + m] * at.get(steps[n].out + b * a.width);
        at.put(to_v + m * a.width, total);
      });
      rows::vectors(a.dim, [&](auto at) {
        const Floats here = at.get(k + m * a.dim);
        Floats total = {}, of_energy = {};
        for (int64_t n = 0; n < count; n++) {
          const Floats t = additive::tanh(at.get(steps[n].q + b * a.dim) + here);
          const float slope = steps[n].slopes[b * a.keys + m];
          of_energy += slope * t;
          total += slope * (1.0f - t * t);
        }
        at.put(to_k + m * a.dim, at.get(a.energy) * total);
        at.put(denergy, at.get(denergy) + of_energy);
      });
    }
  }
}

}  // namespace weft
