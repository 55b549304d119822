#if defined(__x86_64__)
#include "isa_avx512.h"

#include "attention/attend.h"
#endif
