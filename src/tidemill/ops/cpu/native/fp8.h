// Products with float8_e4m3fn weights, over the same `V` as path.h. They are widened to float32; nothing is rounded.
#pragma once

#include <cstdlib>

#include "path.h"

namespace tidemill {
namespace {

constexpr int64_t fp8_outputs = 4;
constexpr int64_t fp8_inputs = 16;  // at once; a row has a multiple of them

typedef uint8_t Sixteen __attribute__((vector_size(fp8_inputs)));

// 16 numbers. A byte's exponent and fraction are those of a float whose exponent is 120 too small. 0x7f, which is NaN,
// is widened like any other, and noted.
template <class V>
TIDEMILL_INLINE void widen_fp8(const uint8_t* from, typename V::Float (&into)[V::count], Sixteen& not_a_number) {
  Sixteen bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  not_a_number |= (Sixteen)((bytes & 0x7f) == 0x7f);
  typename V::Int found[V::count];
  V::load_top_bytes(from, found);
  for (int n = 0; n < V::count; ++n) into[n] = V::float_of_bits((found[n] >> 4) & int32_t(0x87f00000)) * 0x1p120f;
}

TIDEMILL_INLINE bool any(Sixteen bytes) {
  uint64_t halves[2];
  std::memcpy(halves, &bytes, sizeof halves);
  return halves[0] | halves[1];
}

TIDEMILL_INLINE float fp8_scale(const Fp8Product& product, int64_t group, int64_t output) {
  const int64_t at = group * product.scale_stride + output;
  if (product.wide) return static_cast<const float*>(product.scales)[at];
  const uint16_t half = static_cast<const uint16_t*>(product.scales)[at];
  const uint32_t bits = uint32_t(int32_t(int16_t(half)) * (1 << 13)) & from_float16_bits;
  return bits_as<float>(bits) * from_float16_factor;
}

// `R` rows with `O` outputs, whose numbers [O, inputs] are in `scratch` as floats where they are `widened`.
template <class V, int R, int O, bool widened>
void multiply_fp8_part(const Fp8Product& product, int64_t row, int64_t output, const float* scratch) {
  using Float = typename V::Float;
  const int64_t inputs = product.inputs;
  const int64_t group = product.group ? product.group : inputs;
  Float total[R][O] = {};
  Sixteen not_a_number[O] = {};
  for (int64_t start = 0, index = 0; start < inputs; start += group, ++index) {
    const int64_t stop = start + group < inputs ? start + group : inputs;
    Float part[R][O] = {};
    for (int64_t at = start; at < stop; at += fp8_inputs) {
      Float found[O][V::count];
      for (int o = 0; o < O; ++o) {
        if (widened) {
          for (int n = 0; n < V::count; ++n) found[o][n] = V::load(scratch + o * inputs + at + n * V::lanes);
        } else {
          widen_fp8<V>(product.data + (output + o) * inputs + at, found[o], not_a_number[o]);
        }
      }
      for (int n = 0; n < V::count; ++n) {
        for (int r = 0; r < R; ++r) {
          const Float x = V::load(product.x + (row + r) * inputs + at + n * V::lanes);
          for (int o = 0; o < O; ++o) part[r][o] = V::add_product(part[r][o], x, found[o][n]);
        }
      }
    }
    for (int o = 0; o < O; ++o) {
      const Float scale = V::splat(fp8_scale(product, index, output + o));
      for (int r = 0; r < R; ++r) total[r][o] = V::add_product(total[r][o], part[r][o], scale);
    }
  }
  for (int r = 0; r < R; ++r) {
    float sums[O] = {};
    for (int o = 0; o < O; ++o) {
      float lanes[V::lanes];
      V::store(lanes, total[r][o]);
      for (int i = 0; i < V::lanes; ++i) sums[o] += lanes[i];
      if (any(not_a_number[o])) sums[o] = __builtin_nanf("");
    }
    write(product.result, (row + r) * product.outputs + output, output, O, sums);
  }
}

template <class V, int O>
void multiply_fp8_outputs(const Fp8Product& product, int64_t output, float* scratch) {
  int64_t row = 0;
  if (scratch) {
    for (int o = 0; o < O; ++o) {
      float* widened = scratch + o * product.inputs;
      Sixteen not_a_number = {};
      for (int64_t at = 0; at < product.inputs; at += fp8_inputs) {
        typename V::Float found[V::count];
        widen_fp8<V>(product.data + (output + o) * product.inputs + at, found, not_a_number);
        for (int n = 0; n < V::count; ++n) V::store(widened + at + n * V::lanes, found[n]);
      }
      if (any(not_a_number)) widened[0] = __builtin_nanf("");
    }
    for (; row + 4 <= product.rows; row += 4) multiply_fp8_part<V, 4, O, true>(product, row, output, scratch);
    for (; row < product.rows; ++row) multiply_fp8_part<V, 1, O, true>(product, row, output, scratch);
  }
  for (; row < product.rows; ++row) multiply_fp8_part<V, 1, O, false>(product, row, output, nullptr);
}

template <class V>
void multiply_fp8(const Fp8Product& product, int64_t first, int64_t last) {
  // Without memory for widened numbers, every row widens them for itself.
  const size_t bytes = sizeof(float) * size_t(fp8_outputs * product.inputs);
  float* scratch = product.rows > 1 ? static_cast<float*>(std::malloc(bytes)) : nullptr;
  int64_t output = first;
  for (; output + fp8_outputs <= last; output += fp8_outputs) {
    multiply_fp8_outputs<V, fp8_outputs>(product, output, scratch);
  }
  for (; output < last; ++output) multiply_fp8_outputs<V, 1>(product, output, scratch);
  std::free(scratch);
}

}  // namespace
}  // namespace tidemill
