// The path of ARM CPUs with dot-product instructions: four inputs of four outputs in one.
#if defined(__aarch64__)

#include <arm_neon.h>
#if defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include "fp8.h"
#include "path.h"

namespace tidemill {
namespace {

struct Neon {
  using Float = float32x4_t;
  using Int = int32x4_t;
  static constexpr int lanes = 4;
  static constexpr int count = 4;

  struct Table {
    int8x16_t numbers;
    TIDEMILL_INLINE explicit Table(const int8_t* from) : numbers(from ? vld1q_s8(from) : vdupq_n_s8(0)) {}
  };

  TIDEMILL_INLINE static Float load(const float* from) { return vld1q_f32(from); }
  TIDEMILL_INLINE static void store(float* to, Float from) { vst1q_f32(to, from); }
  TIDEMILL_INLINE static Float load_float16(const uint16_t* from) {
    const int32x4_t bits = vshll_n_s16(vreinterpret_s16_u16(vld1_u16(from)), 13);
    return vreinterpretq_f32_s32(vandq_s32(bits, vdupq_n_s32(int32_t(from_float16_bits)))) * from_float16_factor;
  }
  // 16 bytes, each the highest of 32 bits.
  TIDEMILL_INLINE static void load_top_bytes(const uint8_t* from, Int (&into)[count]) {
    const uint8x16_t bytes = vld1q_u8(from), none = vdupq_n_u8(0);
    const uint16x8_t low = vreinterpretq_u16_u8(vzip1q_u8(none, bytes));
    const uint16x8_t high = vreinterpretq_u16_u8(vzip2q_u8(none, bytes));
    into[0] = vreinterpretq_s32_u16(vzip1q_u16(vdupq_n_u16(0), low));
    into[1] = vreinterpretq_s32_u16(vzip2q_u16(vdupq_n_u16(0), low));
    into[2] = vreinterpretq_s32_u16(vzip1q_u16(vdupq_n_u16(0), high));
    into[3] = vreinterpretq_s32_u16(vzip2q_u16(vdupq_n_u16(0), high));
  }
  TIDEMILL_INLINE static Float splat(float number) { return vdupq_n_f32(number); }
  TIDEMILL_INLINE static Int splat(int32_t number) { return vdupq_n_s32(number); }
  TIDEMILL_INLINE static Float float_of_bits(Int bits) { return vreinterpretq_f32_s32(bits); }
  TIDEMILL_INLINE static Float add_product(Float sum, Float a, Float b) { return vfmaq_f32(sum, a, b); }

  template <Codes codes>
  TIDEMILL_INLINE static int8x16_t numbers(const uint8_t* data, int half, int quad, int n, const Table& table) {
    if (codes == Codes::bytes) return vreinterpretq_s8_u8(vld1q_u8(data + (4 * half + quad) * 64 + 16 * n));
    const uint8x16_t both = vld1q_u8(data + quad * 64 + 16 * n);
    const uint8x16_t found = half ? vshrq_n_u8(both, 4) : vandq_u8(both, vdupq_n_u8(15));
    return codes == Codes::table ? vqtbl1q_s8(table.numbers, found) : vreinterpretq_s8_u8(found);
  }

  template <Codes codes, int R, int quad>
  TIDEMILL_INLINE static void add_quad(
      Int (&sums)[R][count], const uint8_t* data, int half, const int8x16_t (&x)[R], const Table& table) {
    for (int n = 0; n < count; ++n) {
      const int8x16_t four = numbers<codes>(data, half, quad, n, table);
      for (int r = 0; r < R; ++r) sums[r][n] = vdotq_laneq_s32(sums[r][n], four, x[r], quad);
    }
    // Compilers like to load all of a tile first, which takes more registers than there are.
    for (int r = 0; R > 1 && r < R; ++r) {
      asm volatile("" : "+w"(sums[r][0]), "+w"(sums[r][1]), "+w"(sums[r][2]), "+w"(sums[r][3])::"memory");
    }
  }

  template <Codes codes, int R>
  TIDEMILL_INLINE static void add_half(
      Int (&sums)[R][count], const uint8_t* data, int half, const int8_t* x, int64_t stride, const Table& table) {
    int8x16_t inputs[R];
    for (int r = 0; r < R; ++r) inputs[r] = vld1q_s8(x + r * stride + 16 * half);
    add_quad<codes, R, 0>(sums, data, half, inputs, table);
    add_quad<codes, R, 1>(sums, data, half, inputs, table);
    add_quad<codes, R, 2>(sums, data, half, inputs, table);
    add_quad<codes, R, 3>(sums, data, half, inputs, table);
  }
};

bool usable() {
#if defined(__linux__)
  return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#else
  return true;  // every Apple CPU that runs 64-bit macOS has them
#endif
}

}  // namespace

const Path dotprod = {"dotprod", usable, round_rows, multiply<Neon>, multiply_fp8<Neon>};

}  // namespace tidemill

#endif
