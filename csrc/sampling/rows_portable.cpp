#include "isa_portable.h"

#include "sampling/rows.h"
