// The path of every CPU.
#define VECTOR_BYTES 16
#include "generic.h"

namespace tidemill {

const Path portable = {"portable", [] { return true; }, round_rows, multiply<Generic>, multiply_fp8<Generic>};

}  // namespace tidemill
