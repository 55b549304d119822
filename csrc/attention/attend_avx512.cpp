#if defined(__x86_64__)
#include "isa_avx512.h"

#include "attention/attend_float.h"
#endif
