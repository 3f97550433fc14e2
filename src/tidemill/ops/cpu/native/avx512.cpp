// The path of x86 CPUs with AVX-512 for bytes (AVX512BW).
#if defined(__x86_64__)

#define VECTOR_BYTES 64
#include "generic.h"

namespace tidemill {
namespace {

bool usable() { return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw"); }

}  // namespace

const Path avx512 = {"avx512", usable, round_rows, multiply<Generic>, multiply_fp8<Generic>};

}  // namespace tidemill

#endif
