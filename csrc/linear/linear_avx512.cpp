#include "dispatch.h"
#if KVSTRATA_X86
#include "isa_avx512.h"
// isa_*.h comes first: it sets the target of everything below.
#include "simd.h"

#include "linear/multiply.h"
#endif
