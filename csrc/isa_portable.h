// First include of a translation unit that any machine can run.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define KVSTRATA_ISA portable
