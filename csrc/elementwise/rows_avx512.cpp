#if defined(__x86_64__)
#include "isa_avx512.h"

#include "elementwise/rows.h"
#endif
