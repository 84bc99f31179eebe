// Rows of a table by number, with what is added to them, and the gradient of the table.
#pragma once

#include "products.h"

namespace weft {

// Numbers [count] of rows of a table [words, dim]; `added` [period, dim] goes to one after the other, or null.
struct Embedding {
  const int64_t* numbers;
  int64_t count, words, dim;
  const float *table, *added;
  int64_t period;
};

// y [count, dim] from number `begin` to `end`. Whether all of these are in the table.
template <class T>
inline bool embed(const Embedding& e, int64_t begin, int64_t end, T* y) {
  for (int64_t n = begin; n < end; n++) {
    if (e.numbers[n] < 0 || e.numbers[n] >= e.words) return false;
    const float* from = e.table + e.numbers[n] * e.dim;
    const float* more = e.added == nullptr ? nullptr : e.added + n % e.period * e.dim;
    each(e.dim, [&](auto at) { at.put(y + n * e.dim, more ? at.get(from) + at.get(more) : at.get(from)); });
  }
  return true;
}

// What grad [count, dim] adds to the gradients of the table and of what was added, in columns from `begin` to `end`.
template <class T>
inline void embed_back(const Embedding& e, const T* grad, int64_t begin, int64_t end, float* table, float* added) {
  for (int64_t n = 0; n < e.count; n++) {
    const T* from = grad + n * e.dim + begin;
    const auto add = [&](float* to) { each(end - begin, [&](auto at) { at.put(to, at.get(to) + at.get(from)); }); };
    if (table != nullptr) add(table + e.numbers[n] * e.dim + begin);
    if (added != nullptr) add(added + n % e.period * e.dim + begin);
  }
}

}  // namespace weft
