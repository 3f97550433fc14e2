// The path of x86 CPUs with AVX2.
#if defined(__x86_64__)

#define VECTOR_BYTES 32
#include "generic.h"

namespace tidemill {
namespace {

bool usable() { return __builtin_cpu_supports("avx2"); }

}  // namespace

const Path avx2 = {"avx2", usable, round_rows, multiply<Generic>, multiply_fp8<Generic>};

}  // namespace tidemill

#endif
