// The products, written once over a type `V` that knows an instruction set's vectors. Included by one file per path,
// inside which everything is local, since the same code compiled for two instruction sets must not be merged.
//
// A row's result is the same whatever rows stand beside it and however many threads run: every kernel below adds a
// row's numbers in the same order, and the compiler may not fuse products and sums on its own (-ffp-contract=off).
#pragma once

#include <cstring>
#include <vector>

#include "kernels.h"

#define TIDEMILL_INLINE inline __attribute__((always_inline))

namespace tidemill {
namespace {

enum class Groups { half, block, many };  // 16 inputs, 32 inputs, more
constexpr int rows_at_once = 2;
constexpr int64_t many_rows = 8;  // for which it pays to turn a tile's nibbles into bytes first
// The bits of 1.5 * 2^23 as a float. An integer below 2^22 added to them makes the bits of their sum, so a sum of
// products that starts here is read as a float at no cost: instructions that convert are slow on many CPUs.
constexpr int32_t float_bits = 0x4b400000;
constexpr float float_start = 12582912.0f;

template <class To, class From>
TIDEMILL_INLINE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "as many bits");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

TIDEMILL_INLINE float from_bfloat16(uint16_t number) { return bits_as<float>(uint32_t(number) << 16); }

TIDEMILL_INLINE uint16_t to_bfloat16(float number) {
  const uint32_t bits = bits_as<uint32_t>(number);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

// The difference of the exponents as a factor: right for subnormal numbers too, not for infinity and NaN.
constexpr float from_float16_factor = 0x1p112f;
constexpr uint32_t from_float16_bits = 0x8fffe000u;

// Outputs from `output` on of a row, whose first is at `at`. Not inlined: many kernels end here.
__attribute__((noinline)) void write(
    const Result& result, int64_t at, int64_t output, int64_t count, const float* numbers) {
  for (int64_t i = 0; i < count; ++i) {
    const float number = result.bias ? numbers[i] + result.bias[output + i] : numbers[i];
    if (result.bfloat16) {
      static_cast<uint16_t*>(result.out)[at + i] = to_bfloat16(number);
    } else {
      static_cast<float*>(result.out)[at + i] = number;
    }
  }
}

// 32 numbers to whole ones from -127 to 127, and what that rounds away likewise: together 15 bits and more. A block with
// NaN or infinity gets the scale NaN, which reaches every output of its row; one whose largest number is below 1e-36,
// where 127 / largest has no float, becomes 0. The second plane is `next` blocks after the first.
constexpr float finer = 254.0f;

TIDEMILL_INLINE void round_block(const float* numbers, int8_t* codes, float* scales, int32_t* sums, int64_t next) {
  uint32_t bits[tile_inputs];
  std::memcpy(bits, numbers, sizeof bits);
  int32_t largest_bits = 0;
  for (int i = 0; i < tile_inputs; ++i) {
    const int32_t magnitude = int32_t(bits[i] & 0x7fffffffu);
    largest_bits = magnitude > largest_bits ? magnitude : largest_bits;
  }
  const bool finite = largest_bits < 0x7f800000;
  const float largest = bits_as<float>(largest_bits);
  const bool counts = finite && largest >= 1e-36f;
  const float inverse = counts ? 127.0f / largest : 0.0f;
  const float scale = finite ? largest / 127.0f : __builtin_nanf("");
  float left[tile_inputs];
  for (int i = 0; i < tile_inputs; ++i) left[i] = counts ? numbers[i] * inverse : 0.0f;
  for (int plane = 0; plane < planes; ++plane) {
    int32_t rounded[tile_inputs];
    for (int i = 0; i < tile_inputs; ++i) rounded[i] = bits_as<int32_t>(left[i] + float_start) - float_bits;
    for (int i = 0; i < tile_inputs; ++i) left[i] = (left[i] - float(rounded[i])) * finer;
    for (int i = 0; i < tile_inputs; ++i) codes[plane * next * tile_inputs + i] = int8_t(rounded[i]);
    int32_t* halves = sums + plane * next * 2;
    halves[0] = halves[1] = 0;
    for (int i = 0; i < tile_inputs / 2; ++i) {
      halves[0] += rounded[i];
      halves[1] += rounded[i + tile_inputs / 2];
    }
    scales[plane * next] = plane ? scale / finer : scale;
  }
}

void round_rows(const Product& product, int64_t first_row, int64_t last_row) {
  const Activations& x = product.x;
  for (int64_t row = first_row; row < last_row; ++row) {
    const int64_t start = (product.first_row + row) * x.inputs;
    for (int64_t block = 0; block < x.blocks; ++block) {
      const int64_t at = block * tile_inputs;
      const int64_t count = x.inputs - at < tile_inputs ? x.inputs - at : tile_inputs;
      const float* numbers = static_cast<const float*>(x.given) + start + at;
      float copied[tile_inputs];
      if (x.bfloat16 || count < tile_inputs) {
        for (int64_t i = 0; i < tile_inputs; ++i) copied[i] = 0.0f;
        const uint16_t* narrow = static_cast<const uint16_t*>(x.given) + start + at;
        for (int64_t i = 0; i < count; ++i) copied[i] = x.bfloat16 ? from_bfloat16(narrow[i]) : numbers[i];
        numbers = copied;
      }
      const int64_t index = row * planes * x.blocks + block;
      round_block(numbers, x.codes + index * tile_inputs, x.scales + index, x.sums + 2 * index, x.blocks);
    }
  }
}

// Scales or offsets of 16 outputs.
template <class V>
TIDEMILL_INLINE void load_group(const void* from, bool wide, int64_t index, typename V::Float (&into)[V::count]) {
  if (wide) {
    const float* found = static_cast<const float*>(from) + index * tile_outputs;
    for (int n = 0; n < V::count; ++n) into[n] = V::load(found + n * V::lanes);
  } else {
    const uint16_t* found = static_cast<const uint16_t*>(from) + index * tile_outputs;
    for (int n = 0; n < V::count; ++n) into[n] = V::load_float16(found + n * V::lanes);
  }
}

// `rows` rows from `row` on with one tile of 16 outputs: R planes of them.
template <class V, Codes codes, Groups groups, int rows>
void multiply_tile(const Product& product, const uint8_t* data, int64_t tile, int64_t row) {
  using Float = typename V::Float;
  using Int = typename V::Int;
  constexpr int R = rows * int(planes);
  constexpr int64_t bytes = tile_outputs * tile_inputs / (codes == Codes::bytes ? 1 : 2);
  constexpr int parts = groups == Groups::half ? 2 : 1;
  const Weight& weight = product.weight;
  const int64_t blocks = weight.blocks;
  const int64_t stride = blocks * tile_inputs;
  const int64_t parts_per_group = groups != Groups::many ? 1 : weight.group ? weight.group / tile_inputs : blocks;
  const int32_t middle = codes == Codes::nibbles && !weight.offsets ? -8 : 0;
  const int8_t* x = product.x.codes + row * planes * stride;
  const float* x_scales = product.x.scales + row * planes * blocks;
  const int32_t* x_sums = product.x.sums + row * planes * blocks * 2;
  const typename V::Table table(weight.table);

  Float total[R][V::count] = {};
  Float part[R][V::count] = {};
  float part_sum[R] = {};
  int64_t group = tile * (weight.group ? stride / weight.group : 1);
  int64_t left = parts_per_group;

  for (int64_t block = 0; block < blocks; ++block, data += bytes, x += tile_inputs) {
    for (int half = 0; half < parts; ++half) {
      Int products[R][V::count];
      int32_t sums[R];
      for (int r = 0; r < R; ++r) {
        const int32_t* halves = x_sums + (r * blocks + block) * 2;
        sums[r] = groups == Groups::half ? halves[half] : halves[0] + halves[1];
        for (int n = 0; n < V::count; ++n) products[r][n] = V::splat(float_bits + middle * sums[r]);
      }
      V::template add_half<codes, R>(products, data, half, x, stride, table);
      if (groups != Groups::half) V::template add_half<codes, R>(products, data, 1, x, stride, table);

      for (int r = 0; r < R; ++r) {
        const float scale = x_scales[r * blocks + block];
        for (int n = 0; n < V::count; ++n) {
          const Float number = V::float_of_bits(products[r][n]) - float_start;
          part[r][n] = groups == Groups::many ? V::add_product(part[r][n], number, V::splat(scale)) : number * scale;
        }
        if (weight.offsets) part_sum[r] += scale * float(sums[r]);
      }
      if (groups == Groups::many && --left) continue;

      Float scales[V::count];
      load_group<V>(weight.scales, weight.wide, group, scales);
      for (int r = 0; r < R; ++r) {
        for (int n = 0; n < V::count; ++n) total[r][n] = V::add_product(total[r][n], part[r][n], scales[n]);
        if (groups == Groups::many) for (int n = 0; n < V::count; ++n) part[r][n] = Float{};
      }
      if (weight.offsets) {
        Float found[V::count];
        load_group<V>(weight.offsets, weight.wide, group, found);
        if (weight.zeros) for (int n = 0; n < V::count; ++n) found[n] = -found[n] * scales[n];
        for (int r = 0; r < R; ++r) {
          for (int n = 0; n < V::count; ++n) total[r][n] = V::add_product(total[r][n], found[n], V::splat(part_sum[r]));
          part_sum[r] = 0.0f;
        }
      }
      ++group;
      left = parts_per_group;
    }
  }

  const int64_t output = tile * tile_outputs;
  const int64_t outputs = weight.outputs - output < tile_outputs ? weight.outputs - output : tile_outputs;
  for (int r = 0; r < rows; ++r) {
    float numbers[tile_outputs];
    for (int n = 0; n < V::count; ++n) V::store(numbers + n * V::lanes, total[2 * r][n] + total[2 * r + 1][n]);
    write(product.result, (product.first_row + row + r) * weight.outputs + output, output, outputs, numbers);
  }
}

// A tile's nibbles as bytes, less the middle code where that is the zero point: the same products, to the bit.
template <Codes codes>
void widen_tile(const Weight& weight, const uint8_t* data, uint8_t* bytes) {
  constexpr int64_t half = tile_outputs * tile_inputs / 2;
  const uint8_t middle = weight.offsets ? 0 : 8;
  for (int64_t block = 0; block < weight.blocks; ++block, data += half, bytes += 2 * half) {
    for (int64_t i = 0; i < half; ++i) {
      const uint8_t low = data[i] & 15, high = data[i] >> 4;
      bytes[i] = codes == Codes::table ? uint8_t(weight.table[low]) : uint8_t(low - middle);
      bytes[half + i] = codes == Codes::table ? uint8_t(weight.table[high]) : uint8_t(high - middle);
    }
  }
}

template <class V, Codes codes, Groups groups>
void multiply_rows(const Product& product, const uint8_t* data, int64_t tile) {
  int64_t row = 0;
  for (; row + rows_at_once <= product.rows; row += rows_at_once) {
    multiply_tile<V, codes, groups, rows_at_once>(product, data, tile, row);
  }
  if (row < product.rows) multiply_tile<V, codes, groups, 1>(product, data, tile, row);
}

template <class V, Codes codes, Groups groups>
void multiply_tiles(const Product& product, int64_t first, int64_t last) {
  constexpr int64_t bytes = tile_outputs * tile_inputs / (codes == Codes::bytes ? 1 : 2);
  const int64_t blocks = product.weight.blocks;
  const bool widened = codes != Codes::bytes && product.rows >= many_rows;
  thread_local std::vector<uint8_t> wide;
  if (widened && int64_t(wide.size()) < 2 * bytes * blocks) wide.resize(size_t(2 * bytes * blocks));
  for (int64_t tile = first; tile < last; ++tile) {
    const uint8_t* data = product.weight.data + tile * blocks * bytes;
    if (widened) {
      widen_tile<codes>(product.weight, data, wide.data());
      multiply_rows<V, Codes::bytes, groups>(product, wide.data(), tile);
    } else {
      multiply_rows<V, codes, groups>(product, data, tile);
    }
  }
}

template <class V, Codes codes>
void multiply_codes(const Product& product, int64_t first, int64_t last) {
  switch (product.weight.group) {
    case 16: return multiply_tiles<V, codes, Groups::half>(product, first, last);
    case 32: return multiply_tiles<V, codes, Groups::block>(product, first, last);
    default: return multiply_tiles<V, codes, Groups::many>(product, first, last);
  }
}

template <class V>
void multiply(const Product& product, int64_t first, int64_t last) {
  switch (product.weight.codes) {
    case Codes::nibbles: return multiply_codes<V, Codes::nibbles>(product, first, last);
    case Codes::table: return multiply_codes<V, Codes::table>(product, first, last);
    case Codes::bytes: return multiply_codes<V, Codes::bytes>(product, first, last);
  }
}

}  // namespace
}  // namespace tidemill
