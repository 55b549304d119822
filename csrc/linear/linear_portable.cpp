#include "isa_portable.h"
// isa_*.h comes first: it sets the target of everything below.
#include "simd.h"

#include "linear/multiply.h"
