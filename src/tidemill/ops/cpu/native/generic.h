// Vectors of any instruction set, by the vector extensions of GCC and Clang: `VECTOR_BYTES` wide. A file that includes
// this names the instruction set it is compiled for. Products of two inputs are added in 16 bits, which hold them.
#pragma once

#include "fp8.h"
#include "path.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tidemill {
namespace {

struct Generic {
  typedef float Float __attribute__((vector_size(VECTOR_BYTES)));
  typedef int32_t Int __attribute__((vector_size(VECTOR_BYTES)));
  typedef uint32_t UnsignedInt __attribute__((vector_size(VECTOR_BYTES)));
  typedef int16_t Short __attribute__((vector_size(VECTOR_BYTES)));
  typedef uint16_t UnsignedShort __attribute__((vector_size(VECTOR_BYTES)));
  typedef uint8_t Bytes __attribute__((vector_size(VECTOR_BYTES)));
  static constexpr int lanes = VECTOR_BYTES / 4;
  static constexpr int count = 64 / VECTOR_BYTES;

  struct Table {
    int8_t numbers[64];
    TIDEMILL_INLINE explicit Table(const int8_t* from) {
      for (int i = 0; i < 64; ++i) numbers[i] = from ? from[i % 16] : int8_t(0);
    }
  };

  template <class Vector>
  TIDEMILL_INLINE static Vector load_as(const void* from) {
    Vector found;
    std::memcpy(&found, from, sizeof found);
    return found;
  }

  TIDEMILL_INLINE static Float load(const float* from) { return load_as<Float>(from); }
  TIDEMILL_INLINE static void store(float* to, Float from) { std::memcpy(to, &from, sizeof from); }
  TIDEMILL_INLINE static Float load_float16(const uint16_t* from) {
    typedef int16_t Halves __attribute__((vector_size(VECTOR_BYTES / 2)));
    const Int bits = __builtin_convertvector(load_as<Halves>(from), Int) << 13;
    return (Float)(bits & int32_t(from_float16_bits)) * from_float16_factor;
  }
  // 16 bytes, each the highest of 32 bits.
  TIDEMILL_INLINE static void load_top_bytes(const uint8_t* from, Int (&into)[count]) {
    typedef uint8_t Few __attribute__((vector_size(lanes)));
    for (int n = 0; n < count; ++n) {
      into[n] = (Int)(__builtin_convertvector(load_as<Few>(from + n * lanes), UnsignedInt) << 24);
    }
  }
  TIDEMILL_INLINE static Float splat(float number) { return Float{} + number; }
  TIDEMILL_INLINE static Int splat(int32_t number) { return Int{} + number; }
  TIDEMILL_INLINE static Float float_of_bits(Int bits) { return (Float)bits; }
  TIDEMILL_INLINE static Float add_product(Float sum, Float a, Float b) { return sum + a * b; }

  TIDEMILL_INLINE static Bytes look_up(Bytes codes, const Table& table) {
#if defined(__aarch64__)
    return (Bytes)vqtbl1q_s8(vld1q_s8(table.numbers), (uint8x16_t)codes);
#elif defined(__AVX512BW__)
    return (Bytes)_mm512_shuffle_epi8(load_as<__m512i>(table.numbers), (__m512i)codes);
#elif defined(__AVX2__)
    return (Bytes)_mm256_shuffle_epi8(load_as<__m256i>(table.numbers), (__m256i)codes);
#else
    Bytes found;
    for (int i = 0; i < VECTOR_BYTES; ++i) found[i] = uint8_t(table.numbers[codes[i]]);
    return found;
#endif
  }

  // Neighbouring pairs of 16 bits, added.
  TIDEMILL_INLINE static Int add_pairs(Short pairs) {
#if defined(__AVX512BW__)
    return (Int)_mm512_madd_epi16((__m512i)pairs, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
    return (Int)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi16(1));
#elif defined(__SSE2__)
    return (Int)_mm_madd_epi16((__m128i)pairs, _mm_set1_epi16(1));
#else
    return ((Int)((UnsignedInt)pairs << 16) >> 16) + ((Int)pairs >> 16);
#endif
  }

  TIDEMILL_INLINE static Short even(Bytes numbers) { return (Short)((UnsignedShort)numbers << 8) >> 8; }
  TIDEMILL_INLINE static Short odd(Bytes numbers) { return (Short)numbers >> 8; }

  // Codes from 0 to 15 times inputs: neighbouring products added.
  TIDEMILL_INLINE static Short multiply_small(Bytes codes, Bytes x) {
#if defined(__AVX512BW__)
    return (Short)_mm512_maddubs_epi16((__m512i)codes, (__m512i)x);
#elif defined(__AVX2__)
    return (Short)_mm256_maddubs_epi16((__m256i)codes, (__m256i)x);
#else
    return even(codes) * even(x) + odd(codes) * odd(x);
#endif
  }

  // The same of numbers with a sign. No sum passes 2 * 128 * 127.
  TIDEMILL_INLINE static Short multiply_signed(Bytes numbers, Bytes x) {
#if defined(__AVX512BW__)
    const __m512i turned =
        _mm512_mask_sub_epi8((__m512i)x, _mm512_movepi8_mask((__m512i)numbers), _mm512_setzero_si512(), (__m512i)x);
    return (Short)_mm512_maddubs_epi16(_mm512_abs_epi8((__m512i)numbers), turned);
#elif defined(__AVX2__)
    const __m256i turned = _mm256_sign_epi8((__m256i)x, (__m256i)numbers);
    return (Short)_mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)numbers), turned);
#else
    return even(numbers) * even(x) + odd(numbers) * odd(x);
#endif
  }

  TIDEMILL_INLINE static Bytes four_inputs(const int8_t* from) {
    int32_t four;
    std::memcpy(&four, from, sizeof four);
    return (Bytes)splat(four);
  }

  template <Codes codes, int R>
  TIDEMILL_INLINE static void add_half(
      Int (&sums)[R][count], const uint8_t* data, int half, const int8_t* x, int64_t stride, const Table& table) {
    Short small[R][count] = {};  // four quads of codes below 16 stay below 4 * 2 * 15 * 127
    for (int quad = 0; quad < 4; ++quad) {
      Bytes inputs[R];
      for (int r = 0; r < R; ++r) inputs[r] = four_inputs(x + r * stride + 16 * half + 4 * quad);
      for (int n = 0; n < count; ++n) {
        const int64_t at = (codes == Codes::bytes ? 4 * half + quad : quad) * 64 + n * VECTOR_BYTES;
        Bytes found = load_as<Bytes>(data + at);
        if (codes != Codes::bytes) found = half ? found >> 4 : found & 15;
        if (codes == Codes::table) found = look_up(found, table);
        for (int r = 0; r < R; ++r) {
          if (codes == Codes::nibbles) {
            small[r][n] += multiply_small(found, inputs[r]);
          } else {
            sums[r][n] += add_pairs(multiply_signed(found, inputs[r]));
          }
        }
      }
    }
    if (codes == Codes::nibbles) {
      for (int r = 0; r < R; ++r) {
        for (int n = 0; n < count; ++n) sums[r][n] += add_pairs(small[r][n]);
      }
    }
  }
};

}  // namespace
}  // namespace tidemill
