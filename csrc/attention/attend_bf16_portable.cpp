#include "isa_portable.h"

#include "attention/attend_bf16.h"
