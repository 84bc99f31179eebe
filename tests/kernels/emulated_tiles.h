// The unit that multiplies blocks of bf16 (AMX), made of other instructions: for CPUs with AVX-512 but without it.
//
// A compiler that reads this before the library (-include) makes it as for a CPU with the unit. Products are as Intel's
// manual has them (TDPBF16PS), down to the order of sums and to what becomes of numbers below the normal ones. What
// would end a process there ends it here, with a word: tiles that this thread has not shaped, or that the system has
// not granted. Tiles are whole, 16 rows of 64 bytes; other shapes are refused.
//
// One thing does not show: here a compiler knows that tiles are read from memory, there it does not (Unit::written).
#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace emulated {

constexpr int TILES = 8, ROWS = 16, BYTES = 64;
typedef char Tile[ROWS][BYTES];

struct Unit {
  alignas(64) Tile tiles[TILES];
  bool shaped;
};
static thread_local Unit unit;
static std::atomic<bool> granted{false};
static std::atomic<int64_t> products{0};

static inline void expect(bool right, const char* what) {
  if (right) return;
  std::fprintf(stderr, "emulated tiles: %s\n", what);
  std::abort();
}

static inline Tile& tile(int i) {
  expect(unit.shaped, "used without a shape");
  return unit.tiles[i];
}

static inline long system_call(long number, int request, int what) {
  expect(number == SYS_arch_prctl && request == 0x1023 && what == 18, "another system call");
  granted = true;
  return 0;
}

static inline void load_shapes(const void* from) {
  expect(granted, "the system has not been asked");
  struct {
    uint8_t palette, start, rest[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } whole = {1, 0, {}, {}, {}};
  for (int i = 0; i < TILES; i++) whole.bytes[i] = BYTES, whole.rows[i] = ROWS;
  static_assert(sizeof(whole) == 64, "as the unit reads it");
  expect(!std::memcmp(from, &whole, sizeof(whole)), "a shape other than that of eight whole tiles");
  std::memset(unit.tiles, 0, sizeof(unit.tiles));
  unit.shaped = true;
}

static inline void release() {
  std::memset(unit.tiles, 0, sizeof(unit.tiles));
  unit.shaped = false;
}

static inline void zero(int to) { std::memset(tile(to), 0, sizeof(Tile)); }

static inline void load(int to, const void* from, int64_t stride) {
  Tile& rows = tile(to);
  for (int i = 0; i < ROWS; i++)
    _mm512_store_si512(rows[i], _mm512_loadu_si512(static_cast<const char*>(from) + i * stride));
}

static inline void store(int from, void* to, int64_t stride) {
  const Tile& rows = tile(from);
  for (int i = 0; i < ROWS; i++)
    _mm512_storeu_si512(static_cast<char*>(to) + i * stride, _mm512_load_si512(rows[i]));
}

// c += a b. The products of the first numbers of pairs have a sum of their own, and those of the second.
__attribute__((noinline)) static void add_product(Tile& c, const Tile& a, const Tile& b) {
  constexpr int PAIRS = BYTES / 4, HIGH = 8;  // rows at a time, so that no sum is waited for
  const __m512i upper = _mm512_set1_epi32(int32_t(0xffff0000));
  __m512 first[PAIRS], second[PAIRS];
  for (int k = 0; k < PAIRS; k++) {
    const __m512i pairs = _mm512_load_si512(b[k]);
    first[k] = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    second[k] = _mm512_castsi512_ps(_mm512_and_si512(pairs, upper));
  }
  for (int m = 0; m < ROWS; m += HIGH) {
    __m512 sums[HIGH][2];
#pragma GCC unroll 8
    for (int r = 0; r < HIGH; r++) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    for (int k = 0; k < PAIRS; k++)
#pragma GCC unroll 8
      for (int r = 0; r < HIGH; r++) {
        int32_t pair;
        std::memcpy(&pair, &a[m + r][4 * k], 4);
        const __m512i pairs = _mm512_set1_epi32(pair);
        const __m512 one = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
        const __m512 two = _mm512_castsi512_ps(_mm512_and_si512(pairs, upper));
        sums[r][0] = _mm512_fmadd_ps(one, first[k], sums[r][0]);
        sums[r][1] = _mm512_fmadd_ps(two, second[k], sums[r][1]);
      }
#pragma GCC unroll 8
    for (int r = 0; r < HIGH; r++) {
      float* to = reinterpret_cast<float*>(c[m + r]);
      _mm512_store_ps(to, _mm512_add_ps(_mm512_load_ps(to), _mm512_add_ps(sums[r][0], sums[r][1])));
    }
  }
}

static inline void multiply(int to, int left, int right) {
  expect(to != left && to != right && left != right, "three tiles are to be different ones");
  const unsigned before = _mm_getcsr();
  _mm_setcsr(0x9fc0);  // to the nearest, even between two; numbers below the normal ones count as 0
  add_product(tile(to), tile(left), tile(right));
  _mm_setcsr(before);
  products.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace emulated

extern "C" int64_t emulated_products() { return emulated::products; }

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated::load_shapes
#define _tile_release emulated::release
#define _tile_zero emulated::zero
#define _tile_loadd emulated::load
#define _tile_stored emulated::store
#define _tile_dpbf16ps emulated::multiply
#define syscall emulated::system_call

#undef __AMX_TILE__
#undef __AMX_BF16__
#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
