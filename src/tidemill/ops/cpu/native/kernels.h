// What the parts of the library share: a product of activations and a packed weight, and the paths that compute it.
// How codes, scales and offsets lie in memory is told in quant/packed.py and quant/tiles.py.
#pragma once

#include <cstdint>

namespace tidemill {

constexpr int64_t tile_outputs = 16;
constexpr int64_t tile_inputs = 32;

enum class Codes { nibbles, table, bytes };

constexpr int64_t planes = 2;

// Activations as the caller has them, and as they are multiplied: for every 32 inputs whole numbers of 8 bits and a scale,
// and the same for what that rounds away, the second plane. A row is multiplied as if it were two, and the two are added.
struct Activations {
  const void* given;
  bool bfloat16;  // otherwise float32
  int64_t inputs;
  int64_t blocks;
  int8_t* codes;   // [rows, planes, blocks, 32], filled up with 0
  float* scales;   // [rows, planes, blocks]
  int32_t* sums;   // [rows, planes, blocks, 2]: of the codes of each half block
};

struct Result {
  const float* bias;  // or null
  void* out;          // [rows, outputs]
  bool bfloat16;
};

struct Weight {
  Codes codes;
  const uint8_t* data;
  const void* scales;
  const void* offsets;  // or null: -8 scales for nibbles, else 0
  bool zeros;           // what stands there are zero points, in units of codes
  const int8_t* table;  // 16 numbers, for Codes::table
  bool wide;            // scales and offsets are float32, otherwise float16
  int64_t outputs;
  int64_t blocks;
  int64_t group;  // inputs, 0: a whole row
};

struct Product {
  Activations x;
  Weight weight;
  Result result;
  int64_t first_row;  // rows below are counted from here
  int64_t rows;
};

// float8_e4m3fn [outputs, inputs] with scales [groups, outputs]; activations are not rounded.
struct Fp8Product {
  const float* x;  // [rows, inputs]
  const uint8_t* data;
  const void* scales;
  int64_t scale_stride;
  bool wide;
  int64_t outputs;
  int64_t inputs;
  int64_t group;
  Result result;
  int64_t rows;
};

// One instruction set's way. All of them share the code of path.h, compiled for that instruction set.
struct Path {
  const char* name;
  bool (*usable)();
  void (*round)(const Product&, int64_t first_row, int64_t last_row);
  void (*multiply)(const Product&, int64_t first_tile, int64_t last_tile);
  void (*multiply_fp8)(const Fp8Product&, int64_t first_output, int64_t last_output);
};

extern const Path portable;
#if defined(__aarch64__)
extern const Path dotprod;
#elif defined(__x86_64__)
extern const Path avx2;
extern const Path avx512;
#endif

}  // namespace tidemill
