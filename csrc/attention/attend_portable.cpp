#include "isa_portable.h"

#include "attention/attend_float.h"
