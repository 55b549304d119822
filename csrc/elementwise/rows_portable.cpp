#include "isa_portable.h"

#include "elementwise/rows.h"
