// Products of matrices as they stand in memory: what training multiplies.
//
// As in products.h, a number of a product has the same bits whatever stands beside it and however many threads there
// are: it is summed over the depth, DEEP terms at a time.
#pragma once

#include "products.h"
#include "threads.h"

namespace weft {

constexpr int64_t DEEP = 256;         // terms that are summed before they are added to what is there
constexpr int64_t BLOCK = 20 * TALL;  // rows of a that stay near while the panels of b pass by

// The number in row i and column j is at[i · row + j · column]; one of the two steps is 1.
struct Plain {
  const float* at;
  int64_t row, column;
};

// M rows of a times a panel of b: added to c, or with the bias its first terms.
template <int M, bool STRIPS = false>
inline void tile(const float* a, int64_t row, const float* b, int64_t depth, float* c, int64_t stride, int real_rows,
                 int real_columns, const float* bias, bool add) {
  Floats total[M][2] = {};
  for (int64_t k = 0; k < depth; k++, b += WIDE, a += STRIPS ? M : 1) {
    const Floats left = load(b), right = load(b + LANES);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
      const Floats x = all(a[STRIPS ? m : m * row]);
      total[m][0] += x * left;
      total[m][1] += x * right;
    }
  }
  float sums[M][WIDE];
#pragma GCC unroll 16
  for (int m = 0; m < M; m++) store(sums[m], total[m][0]), store(sums[m] + LANES, total[m][1]);
  for (int m = 0; m < real_rows; m++)
    each(real_columns, [&](auto at) {
      auto y = at.get(sums[m]);
      if (bias) y += at.get(bias);
      at.put(c + m * stride, add ? at.get(c + m * stride) + y : y);
    });
}

template <int M>
inline void tile_of(int rows, const float* a, int64_t row, const float* b, int64_t depth, float* c, int64_t stride,
                    int columns, const float* bias, bool add) {
  if constexpr (M > 0) {
    if (rows == M)
      tile<M>(a, row, b, depth, c, stride, M, columns, bias, add);
    else
      tile_of<M - 1>(rows, a, row, b, depth, c, stride, columns, bias, add);
  }
}

// A panel of b [depth, columns]: [depth][WIDE], filled up with zeros.
inline void pack_panel(Plain b, int64_t depth, int columns, float* to) {
  if (b.column == 1 && columns == WIDE) {
    for (int64_t k = 0; k < depth; k++, to += WIDE, b.at += b.row)
      store(to, load(b.at)), store(to + LANES, load(b.at + LANES));
    return;
  }
  if (columns < WIDE) std::fill(to, to + depth * WIDE, 0.0f);
  for (int64_t k = 0; k < depth; k++)
    for (int j = 0; j < columns; j++) to[k * WIDE + j] = b.at[k * b.row + j * b.column];
}

// Rows of a [rows, depth], whose columns stand together, in strips [depth][TALL], filled up with zeros.
inline void pack_strips(Plain a, int rows, int64_t depth, float* to) {
  if (rows % TALL) std::fill(to + rows / TALL * TALL * depth, to + (rows / TALL + 1) * TALL * depth, 0.0f);
  for (int64_t k = 0; k < depth; k++) {
    const float* from = a.at + k * a.column;
    int r = 0;
    for (; r + TALL <= rows; r += TALL) std::memcpy(to + r * depth + k * TALL, from + r, TALL * sizeof(float));
    for (int m = 0; r + m < rows; m++) to[r * depth + k * TALL + m] = from[r + m];
  }
}

// c [rows, columns] = a [rows, depth] · b [depth, columns], plus the bias; or added to c. By one thread.
inline void multiply(Plain a, Plain b, float* c, int64_t stride, int64_t rows, int64_t columns, int64_t depth,
                     const float* bias, bool add) {
  static thread_local std::vector<float> kept, near;
  const int64_t wide = panels(columns);
  const bool direct = a.column == 1;
  const size_t room = size_t(wide * WIDE * std::min(depth, DEEP));
  if (kept.size() < room) kept.resize(room);  // never less: what grows is filled with zeros
  if (near.empty()) near.resize(BLOCK * DEEP);
  for (int64_t first = 0; first == 0 || first < depth; first += DEEP) {
    const int64_t deep = std::min(DEEP, depth - first);
    const bool more = add || first > 0;
    for (int64_t p = 0; p < wide; p++) {
      const Plain part = {b.at + first * b.row + p * WIDE * b.column, b.row, b.column};
      pack_panel(part, deep, int(std::min<int64_t>(WIDE, columns - p * WIDE)), kept.data() + p * WIDE * deep);
    }
    for (int64_t row = 0; row < rows; row += BLOCK) {
      const int some = int(std::min(BLOCK, rows - row));
      const Plain part = {a.at + row * a.row + first * a.column, a.row, a.column};
      if (!direct) pack_strips(part, some, deep, near.data());
      for (int64_t p = 0; p < wide; p++) {
        const int real = int(std::min<int64_t>(WIDE, columns - p * WIDE));
        const float* panel = kept.data() + p * WIDE * deep;
        const float* start = bias && !first ? bias + p * WIDE : nullptr;
        float* to = c + row * stride + p * WIDE;
        int r = 0;
        for (; r + TALL <= some; r += TALL, to += TALL * stride)
          if (direct)
            tile<TALL>(part.at + r * a.row, a.row, panel, deep, to, stride, TALL, real, start, more);
          else
            tile<TALL, true>(near.data() + r * deep, 0, panel, deep, to, stride, TALL, real, start, more);
        if (r < some && direct)
          tile_of<TALL - 1>(some - r, part.at + r * a.row, a.row, panel, deep, to, stride, real, start, more);
        else if (r < some)
          tile<TALL, true>(near.data() + r * deep, 0, panel, deep, to, stride, some - r, real, start, more);
      }
    }
  }
}

// The same by several threads. Each has its own columns of b; or rows of a, where these must be packed.
inline void multiply(Plain a, Plain b, float* c, int64_t stride, int64_t rows, int64_t columns, int64_t depth,
                     const float* bias, bool add, int threads) {
  const bool by_columns = a.column == 1;
  const int64_t step = by_columns ? WIDE : TALL, pieces = ((by_columns ? columns : rows) + step - 1) / step;
  const int workers = int(std::max<int64_t>(1, std::min<int64_t>(threads, pieces)));
  shared_out(workers, [&](int worker) {
    const int64_t from = pieces * worker / workers * step, to = pieces * (worker + 1) / workers * step;
    if (by_columns)
      multiply(a, Plain{b.at + from * b.column, b.row, b.column}, c + from, stride, rows, std::min(to, columns) - from,
               depth, bias ? bias + from : nullptr, add);
    else
      multiply(Plain{a.at + from * a.row, a.row, a.column}, b, c + from * stride, stride, std::min(to, rows) - from,
               columns, depth, bias, add);
  });
}

}  // namespace weft
