// The library's functions, called from Python (library.py). They return 0, or 1 when there is no memory.
#include <atomic>
#include <cstring>
#include <new>
#include <vector>

#include "kernels.h"
#include "team.h"

#ifndef TIDEMILL_SOURCES
#define TIDEMILL_SOURCES ""
#endif

namespace tidemill {
namespace {

// Best first.
const Path* const paths[] = {
#if defined(__aarch64__)
    &dotprod,
#elif defined(__x86_64__)
    &avx512, &avx2,
#endif
    &portable,
};

constexpr int64_t rows_in_cache = 128;
constexpr int64_t products_per_thread = 100000;
constexpr int64_t numbers_per_thread = 16384;

const Path* best() {
  for (const Path* path : paths) {
    if (path->usable()) return path;
  }
  return &portable;
}

std::atomic<const Path*> chosen{nullptr};

const Path& path() {
  const Path* found = chosen.load(std::memory_order_relaxed);
  if (!found) chosen.store(found = best(), std::memory_order_relaxed);
  return *found;
}

int32_t worth(int64_t work, int64_t per_thread, int32_t threads) {
  const int64_t enough = work / per_thread;
  return enough < threads ? int32_t(enough) : threads;
}

// Several for each thread, so that one that is interrupted does not hold the others up.
int64_t stretch(int64_t count, int32_t threads) {
  if (threads < 2) return count;
  const int64_t step = count / (int64_t(threads) * 8);
  return step > 1 ? step : 1;
}

void multiply(Product product, int64_t rows, int32_t threads) {
  Activations& x = product.x;
  const int64_t held = rows < rows_in_cache ? rows : rows_in_cache;
  thread_local std::vector<int8_t> codes;
  thread_local std::vector<float> scales;
  thread_local std::vector<int32_t> sums;
  const size_t blocks = size_t(held * planes * x.blocks);
  if (scales.size() < blocks) {
    codes.resize(blocks * tile_inputs);
    scales.resize(blocks);
    sums.resize(blocks * 2);
  }
  x.codes = codes.data();
  x.scales = scales.data();
  x.sums = sums.data();
  const Path& by = path();
  const int64_t tiles = (product.weight.outputs + tile_outputs - 1) / tile_outputs;
  for (product.first_row = 0; product.first_row < rows; product.first_row += held) {
    product.rows = rows - product.first_row < held ? rows - product.first_row : held;
    const int32_t rounding = worth(product.rows * x.inputs, numbers_per_thread, threads);
    share_out(product.rows, stretch(product.rows, rounding), rounding,
              [&](int64_t first, int64_t last) { by.round(product, first, last); });
    const int32_t multiplying = worth(product.rows * x.inputs * product.weight.outputs, products_per_thread, threads);
    share_out(tiles, stretch(tiles, multiplying), multiplying,
              [&](int64_t first, int64_t last) { by.multiply(product, first, last); });
  }
}

}  // namespace
}  // namespace tidemill

using namespace tidemill;

#pragma GCC visibility push(default)
extern "C" {

// A hash of the sources it was built from.
const char* tidemill_sources() { return TIDEMILL_SOURCES; }

// The name of the path in place `index` of those that run here, best first; null past the last.
const char* tidemill_path(int32_t index) {
  for (const Path* path : paths) {
    if (path->usable() && index-- == 0) return path->name;
  }
  return nullptr;
}

// 0 if products are computed by this path from now on, 1 if it does not run here.
int32_t tidemill_use(const char* name) {
  for (const Path* path : paths) {
    if (std::strcmp(path->name, name) == 0 && path->usable()) {
      chosen.store(path);
      return 0;
    }
  }
  return 1;
}

int32_t tidemill_linear(
    const void* x, int32_t x_is_bfloat16, int64_t rows, int64_t inputs, int64_t outputs, const uint8_t* data,
    int32_t bits, const int8_t* table, const void* scales, const void* offsets, int32_t zeros, int32_t wide,
    int64_t group,
    const float* bias, void* out, int32_t threads) {
  Product product{};
  const int64_t blocks = (inputs + tile_inputs - 1) / tile_inputs;
  const Codes codes = bits == 8 ? Codes::bytes : table ? Codes::table : Codes::nibbles;
  product.x = {x, x_is_bfloat16 != 0, inputs, blocks, nullptr, nullptr, nullptr};
  product.weight = {codes, data, scales, offsets, zeros != 0, table, wide != 0, outputs, blocks, group};
  product.result = {bias, out, x_is_bfloat16 != 0};
  try {
    multiply(product, rows, threads);
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}

// float8_e4m3fn [outputs, inputs], inputs a multiple of 16; row g of the scales begins at g * scale_stride.
int32_t tidemill_fp8_linear(
    const float* x, int64_t rows, int64_t inputs, int64_t outputs, const uint8_t* data, const void* scales,
    int64_t scale_stride, int32_t wide, int64_t group, const float* bias, float* out, int32_t threads) {
  Fp8Product product{x, data, scales, scale_stride, wide != 0, outputs, inputs, group, {bias, out, false}, rows};
  const Path& by = path();
  const int32_t multiplying = worth(rows * inputs * outputs, products_per_thread, threads);
  share_out(outputs, stretch(outputs, multiplying), multiplying,
            [&](int64_t first, int64_t last) { by.multiply_fp8(product, first, last); });
  return 0;
}

}  // extern "C"
#pragma GCC visibility pop
