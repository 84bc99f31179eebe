// The output layer and its losses in one: some rows at a time their logits, the losses, the gradients in place of the
// logits, and of these the gradients of the rows, while all of it is near; and for some of these at a time the gradient
// of the layer. Nobody sees logits as a whole. In bf16 logits and their gradients are rounded as elsewhere.
#pragma once

#include "losses.h"
#include "memory.h"
#include "packing.h"
#include "threads.h"

namespace weft {

struct Output {
  int64_t rows, dim, words;
  const void* x[2];        // [rows, dim] of one pass, or of two; bf16 if narrow, else float
  const float* weight;     // [words, dim]
  const int64_t* targets;  // [rows]
  float smoothing, apart;  // apart: the weight of how far two passes are apart
  int32_t narrow;
  Cost* costs;             // [rows]
  float* divergences;      // [rows], of two passes
  void* dx[2];             // [rows, dim]
  float* dweight;          // [words, dim], or null: without gradients
};

namespace outputs {

using packing::GRAIN;
using packing::PANEL;

constexpr int64_t NEAR = 1 << 20;     // bytes of logits that a thread has before it
constexpr int64_t SHORTEST = 32, TALLEST = 128;  // rows of them
constexpr int64_t TOGETHER = 512;     // rows of a thread whose gradients of the layer are multiplied together

template <class T, class E>
struct Work {
  using Packing = packing::Packing<E>;
  using Kept = packing::Kept<E>;

  const Output& o;
  const int passes;
  const int64_t wide, high, count;  // of a row of logits; rows of a block; blocks
  float *forth, *back;              // the layer, packed for both ways
  const float* zeros;               // [dim]
  Kept kept;

  explicit Work(const Output& o)
      : o(o), passes(o.x[1] == nullptr ? 1 : 2), wide((o.words + GRAIN - 1) / GRAIN * GRAIN),
        high(std::clamp(NEAR / (passes * wide * int64_t(sizeof(T))) / SHORTEST * SHORTEST, SHORTEST, TALLEST)),
        count((o.rows + high - 1) / high) {}

  bool trains() const { return o.dweight != nullptr; }
  int64_t logits() const { return aligned(passes * high * wide * int64_t(sizeof(T)) / 4); }  // in floats
  int64_t room() const {  // floats that a thread needs for a block
    return logits() + aligned(high * o.dim) + Packing::room(high, std::max(o.dim, wide));
  }

  // A worker's share.
  void pack(int worker, int workers) const {
    const int64_t grains = wide / GRAIN, shares = (wide + PANEL - 1) / PANEL;
    for (int64_t n = shares * worker / workers * PANEL; n < std::min(shares * (worker + 1) / workers * PANEL, o.words); n += PANEL)
      Packing::pack_turned(o.dim, n, std::min(PANEL, o.words - n),
                           [&](int64_t i) { return n + i < o.words ? o.weight + (n + i) * o.dim : zeros; }, forth);
    if (!trains()) return;
    const int64_t begin = grains * worker / workers * GRAIN, end = std::min(grains * (worker + 1) / workers * GRAIN, o.words);
    packing::panels(o.dim, [&](int64_t n, int64_t w) {
      Packing::pack(o.words, n, w, begin, end, [&](int64_t k) { return o.weight + k * o.dim + n; }, back);
    });
  }

  // `step`: where the gradients of this block begin among those that are kept.
  void work(int64_t block, int64_t step, float* memory) const {
    const int64_t from = block * high, rows = std::min(high, o.rows - from);
    T* all = reinterpret_cast<T*>(memory);
    float *sums = memory + logits(), *some = sums + aligned(high * o.dim);
    const auto part = [&](const void* x) { return static_cast<const T*>(x) + from * o.dim; };
    for (int pass = 0; pass < passes; pass++) {
      T* z = all + pass * high * wide;
      Packing::times(rows, part(o.x[pass]), o.dim, o.dim, forth, o.words, some, [&](int64_t n) {
        return [=, wide = wide](int64_t r, Floats sum) { store(z + r * wide + n, sum); };
      });
      for (int64_t r = 0; r < rows; r++) std::fill(z + r * wide + o.words, z + (r + 1) * wide, T());
    }
    const int64_t* targets = o.targets + from;
    if (passes == 1)
      cross_entropy(all, rows, o.words, wide, targets, o.smoothing, trains(), o.costs + from);
    else
      rdrop(all, all + high * wide, rows, o.words, wide, targets, o.smoothing, o.apart, trains(), o.costs + from,
            o.divergences + from);
    for (int pass = 0; pass < passes && trains(); pass++) {
      const T* z = all + pass * high * wide;
      Packing::into(rows, z, wide, o.words, back, o.dim, sums, some);
      T* dx = static_cast<T*>(o.dx[pass]) + from * o.dim;
      each(rows * o.dim, [&](auto at) { at.put(dx, at.get(sums)); });
      kept.keep(step + pass * Kept::steps_of(rows), rows, z, wide, part(o.x[pass]), o.dim);
    }
  }
};

}  // namespace outputs

// All of it, by several threads: nothing depends on how many.
template <class T, class E>
inline void output(const Output& o, int threads) {
  using Packing = packing::Packing<E>;
  using Kept = packing::Kept<E>;
  if (!o.rows) {
    if (o.dweight != nullptr) std::fill(o.dweight, o.dweight + o.words * o.dim, 0.0f);
    return;
  }
  outputs::Work<T, E> work(o);
  const int workers = int(std::min<int64_t>(work.count, std::max(threads, 1)));
  const int64_t each_time = std::max<int64_t>(1, outputs::TOGETHER / (work.passes * work.high));
  const int64_t some = std::min(work.count, workers * each_time);                       // blocks at a time
  const int64_t apart = work.passes * Kept::steps_of(work.high), steps = some * apart;  // steps of one; of them
  const int64_t forth = Packing::size(o.dim, o.words), room = work.room();
  const int64_t back = work.trains() ? Packing::size(o.words, o.dim) : 0;
  const int64_t left = work.trains() ? Kept::size(o.words, steps) : 0, right = work.trains() ? Kept::size(o.dim, steps) : 0;
  Workspace memory(forth + back + left + right + o.dim + workers * room + 6 * ALIGNED);
  work.forth = memory.take(forth), work.back = memory.take(back);
  float *of_words = memory.take(left), *of_dim = memory.take(right), *zeros = memory.take(o.dim);
  work.kept = {of_words, of_dim, o.words, o.dim, steps};
  std::fill(zeros, zeros + o.dim, 0.0f);
  work.zeros = zeros;
  float* rooms = memory.take(workers * room);
  all_of(workers, [&](int worker) { work.pack(worker, workers); });
  for (int64_t begin = 0; begin < work.count; begin += some) {
    const int64_t end = std::min(begin + some, work.count);
    all_of(workers, [&](int worker) {
      const typename E::Unit unit;
      for (int64_t i = (end - begin) * worker / workers; i < (end - begin) * (worker + 1) / workers; i++)
        work.work(begin + i, i * apart, rooms + worker * room);
    });
    if (!work.trains()) continue;
    const int64_t rest = std::min(end * work.high, o.rows) - (end - 1) * work.high;  // rows of the last block
    const int64_t deep = (end - begin - 1) * apart + work.passes * Kept::steps_of(rest);
    all_of(workers, [&](int worker) {
      const typename E::Unit unit;
      work.kept.multiply(deep, o.dweight, begin > 0, worker, workers);
    });
  }
}

}  // namespace weft
