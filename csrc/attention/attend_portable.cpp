#include "isa_portable.h"

#include "attention/attend.h"
