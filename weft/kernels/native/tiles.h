// Products of bf16 by the unit that multiplies whole blocks of them (AMX): 16 rows of 32 numbers times 32 rows of 16.
//
// Factors are packed block by block, a kilobyte each, which is 16 rows of 16 words of two numbers: of a left factor a
// word has two numbers that follow each other in a row, of a right one two that follow each other in a column. So what
// is a block of a matrix as a left factor is, turned, one of its transpose as a right factor, and the other way round.
// What a matrix has not of its last blocks is zeros. A factor that stands in such rows of words may be read there.
//
// Sums are in float, and each is one sum over the depth, block after block: the same bits in any company.
#pragma once

#include "products.h"

#if defined(WEFT_AVX512) && defined(__AVX512BF16__) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#define WEFT_TILES
#include <sys/syscall.h>
#include <unistd.h>

namespace weft {
namespace tiles {

constexpr int64_t SIDE = 16, DEPTH = 32, BLOCK = SIDE * DEPTH;  // numbers
constexpr int64_t PAIR = 2 * SIDE;                              // rows, and columns, that are multiplied together

inline int64_t blocks(int64_t n, int64_t of) { return (n + of - 1) / of; }
inline int64_t steps(int64_t depth) { return blocks(depth, DEPTH); }
// Numbers of a packed factor of so many rows, or columns.
inline int64_t packed(int64_t sides, int64_t depth) { return blocks(sides, SIDE) * steps(depth) * BLOCK; }

// Whether the system lets this process use the unit.
inline bool ready() {
  constexpr int REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM
  static const bool yes = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
  return yes;
}

// For as long as it lives, this thread's unit has eight tiles of one block each. Others set it as they need it.
class Unit {
 public:
  Unit() {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, rest[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } shape;
    for (int i = 0; i < 8; i++) shape.bytes[i] = 2 * DEPTH, shape.rows[i] = SIDE;
    written();
    _tile_loadconfig(&shape);
  }
  ~Unit() { _tile_release(); }
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;

  // What was written before is there when a tile is read: compilers do not know that it reads memory.
  static void written() { asm volatile("" ::: "memory"); }
};

// 16 words of numbers of which n are there.
inline Floats words(const bf16* at, int64_t n) {
  return (Floats)_mm512_maskz_loadu_epi16(n >= DEPTH ? ~0u : (1u << n) - 1, at);
}
inline Floats words(const float* at, int64_t n) {
  const auto half = [&](int64_t from) {
    const int64_t m = std::clamp<int64_t>(n - from, 0, SIDE);
    return _mm512_maskz_loadu_ps((1u << m) - 1, at + from);
  };
  return (Floats)_mm512_cvtne2ps_pbh(half(SIDE), half(0));
}

// 16 words of the first n numbers of two rows.
inline __m512i halves(const bf16* at, int64_t n) {
  return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(n >= SIDE ? 0xffff : (1u << n) - 1, at));
}
inline __m512i halves(const float* at, int64_t n) {
  const __m256bh narrow = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(n >= SIDE ? 0xffff : (1u << n) - 1, at));
  return _mm512_cvtepu16_epi32((__m256i)narrow);
}
template <class T>
inline Floats pairs(const T* low, const T* high, int64_t n) {
  const __m512i above = high == nullptr ? __m512i{} : _mm512_slli_epi32(halves(high, n), 16);
  return (Floats)_mm512_or_epi32(halves(low, n), above);
}

inline void put(Floats* square, bool turned, bf16* to) {
  if (turned) turn(square);
#pragma GCC unroll 16
  for (int i = 0; i < SIDE; i++) store(reinterpret_cast<float*>(to) + i * SIDE, square[i]);
}

// A matrix [sides, depth], of which row(i) is where row i begins, as a left factor [sides, depth]; turned as a right one
// [depth, sides]: the blocks of 16 of its rows, `apart` numbers from one such sixteen to the next.
template <class F>
inline void pack_rows(int64_t sides, int64_t depth, F row, bool turned, bf16* to, int64_t apart) {
  for (int64_t i = 0; i < sides; i += SIDE, to += apart)
    for (int64_t k = 0; k < depth; k += DEPTH) {
      Floats square[SIDE];
#pragma GCC unroll 16
      for (int64_t r = 0; r < SIDE; r++) square[r] = i + r < sides ? words(row(i + r) + k, depth - k) : Floats{};
      put(square, turned, to + k * SIDE);
    }
}

// The same of a matrix [depth, sides]: a right factor, or turned a left one.
template <class F>
inline void pack_columns(int64_t sides, int64_t depth, F row, bool turned, bf16* to, int64_t apart) {
  for (int64_t i = 0; i < sides; i += SIDE, to += apart)
    for (int64_t k = 0; k < depth; k += DEPTH) {
      Floats square[SIDE];
#pragma GCC unroll 16
      for (int64_t r = 0; r < SIDE; r++) {
        const int64_t low = k + 2 * r;
        const auto* at = low < depth ? row(low) + i : nullptr;
        square[r] = at == nullptr ? Floats{} : pairs(at, low + 1 < depth ? row(low + 1) + i : nullptr, sides - i);
      }
      put(square, turned, to + k * SIDE);
    }
}

// A factor in blocks: numbers from one row of a block to the next, to the next 16 rows or columns, and deeper.
struct Factor {
  const bf16* at;
  int64_t row, beside, deeper;
  Factor from(int64_t side) const { return {at + side / SIDE * beside, row, beside, deeper}; }
  Factor deep(int64_t steps) const { return {at + steps * deeper, row, beside, deeper}; }
};
inline Factor in_blocks(const bf16* at, int64_t apart) { return {at, DEPTH, apart, BLOCK}; }
// x [rows, depth], whose rows are x_row numbers apart, as a left factor: where it stands, or packed into `room`.
inline Factor left_factor(int64_t rows, const bf16* x, int64_t x_row, int64_t depth, bf16* room) {
  if (rows % SIDE == 0 && depth % DEPTH == 0) return {x, x_row, SIDE * x_row, DEPTH};
  pack_rows(rows, depth, [&](int64_t r) { return x + r * x_row; }, false, room, steps(depth) * BLOCK);
  return in_blocks(room, steps(depth) * BLOCK);
}

// R × C blocks of sums begin with what is at c, or with 0; take so many steps more; are put at c.
template <int R, int C>
inline void begin(const float* c, int64_t row, bool more) {
  if (!more) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    return;
  }
  _tile_loadd(0, c, 4 * row);
  if constexpr (C == 2) _tile_loadd(1, c + SIDE, 4 * row);
  if constexpr (R == 2) _tile_loadd(2, c + SIDE * row, 4 * row);
  if constexpr (R == 2 && C == 2) _tile_loadd(3, c + SIDE * row + SIDE, 4 * row);
}
template <int R, int C>
inline void add(Factor a, Factor b, int64_t steps) {
  const int64_t a_row = 2 * a.row, b_row = 2 * b.row;
  for (; steps > 0; steps--, a.at += a.deeper, b.at += b.deeper) {
    _tile_loadd(4, a.at, a_row);
    _tile_loadd(6, b.at, b_row);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (C == 2) {
      _tile_loadd(7, b.at + b.beside, b_row);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (R == 2) {
      _tile_loadd(5, a.at + a.beside, a_row);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (C == 2) _tile_dpbf16ps(3, 5, 7);
    }
  }
}
template <int R, int C>
inline void end(float* c, int64_t row) {
  _tile_stored(0, c, 4 * row);
  if constexpr (C == 2) _tile_stored(1, c + SIDE, 4 * row);
  if constexpr (R == 2) _tile_stored(2, c + SIDE * row, 4 * row);
  if constexpr (R == 2 && C == 2) _tile_stored(3, c + SIDE * row + SIDE, 4 * row);
}

// f(constants R, C) for so many rows and columns that are left, which may be more than a pair of blocks.
template <class F>
inline void shaped(int64_t rows, int64_t columns, F f) {
  using One = std::integral_constant<int, 1>;
  using Two = std::integral_constant<int, 2>;
  rows > SIDE ? (columns > SIDE ? f(Two(), Two()) : f(Two(), One()))
              : (columns > SIDE ? f(One(), Two()) : f(One(), One()));
}

// f(first column, columns, sums [rows, PAIR]) for all columns of up to 32 rows of a left factor times a right one.
template <class F>
inline void multiply(int64_t rows, Factor a, Factor b, int64_t depth, int64_t width, F f) {
  alignas(64) float sums[PAIR * PAIR];
  for (int64_t n = 0; n < width; n += PAIR)
    shaped(rows, width - n, [&](auto r, auto c) {
      constexpr int R = decltype(r)::value, C = decltype(c)::value;
      begin<R, C>(nullptr, 0, false);
      add<R, C>(a, b.from(n), depth);
      end<R, C>(sums, PAIR);
      f(n, std::min(PAIR, width - n), sums);
    });
}

// c [rows, width] = a b, or that much more: c in float, in whole blocks or not.
inline void multiply_into(int64_t rows, Factor a, Factor b, int64_t depth, int64_t width, float* c, int64_t c_row,
                          bool more) {
  alignas(64) float some[PAIR * PAIR];
  for (int64_t m = 0; m < rows; m += PAIR)
    for (int64_t n = 0; n < width; n += PAIR)
      shaped(rows - m, width - n, [&](auto r, auto w) {
        constexpr int R = decltype(r)::value, C = decltype(w)::value;
        const int64_t high = std::min<int64_t>(R * SIDE, rows - m), wide = std::min<int64_t>(C * SIDE, width - n);
        const bool whole = high == R * SIDE && wide == C * SIDE;
        float* to = c + m * c_row + n;
        float* at = whole ? to : some;
        const int64_t row = whole ? c_row : PAIR;
        if (!whole && more)
          for (int64_t i = 0; i < high; i++) std::copy_n(to + i * c_row, wide, some + i * PAIR);
        Unit::written();
        begin<R, C>(at, row, more);
        add<R, C>(a.from(m), b.from(n), depth);
        end<R, C>(at, row);
        if (!whole)
          for (int64_t i = 0; i < high; i++) std::copy_n(some + i * PAIR, wide, to + i * c_row);
      });
}

}  // namespace tiles
}  // namespace weft
#endif
