// What is dropped and what is kept: the hash of kernels/dropout.py.
#pragma once

#include "products.h"

namespace weft {

typedef int64_t Longs WEFT_VECTOR(int64_t, 8);
typedef uint64_t Counts WEFT_VECTOR(uint64_t, 8);

// A round of kernels/dropout.py's _hash: fold the high half into the low, multiply.
inline Counts mixed(Counts x, uint64_t factor) { return (x ^ (Counts)((Longs)x >> 32)) * factor; }

// The words of 16-bit decisions that this hash makes, from number `first` on; of all there are `words`. Eight at a
// time: `to` has room for seven more.
inline void decide(uint64_t key, int64_t words, int64_t first, int64_t count, int64_t* to) {
  constexpr int64_t TURN = 1 << 17;
  constexpr uint64_t STRIDE = 0x9E3779B97F4A7C15;
  const int64_t end = first + count;
  for (int64_t word = first; word < end;) {
    const int64_t begin = word / TURN * TURN, half = (std::min(TURN, words - begin) + 1) / 2;
    const bool late = word - begin >= half;  // these are one round more of the first half
    const int64_t stop = std::min(end, late ? begin + TURN : begin + half);
    const uint64_t base = key + uint64_t(word - (late ? half : 0)) * STRIDE;
    Counts x;
    for (int i = 0; i < 8; i++) x[i] = base + i * STRIDE;
    for (; word < stop; word += 8, to += 8, x += 8 * STRIDE) {
      const Counts y = mixed(mixed(x, 0xBF58476D1CE4E5B9), 0x94D049BB133111EB);
      *reinterpret_cast<Counts*>(to) = late ? mixed(y, 0xD6E8FEB86659FD93) : y;
    }
    to -= word - stop, word = stop;
  }
}

}  // namespace weft
