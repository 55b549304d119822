// Arithmetic that takes denormals for zeros and makes none, as products of bf16 do, for as long as one of these lives.
//
// A machine with neither of these registers keeps denormals: there, results that involve some differ.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace kvstrata {
namespace KVSTRATA_ISA {

class FlushDenormals {
 public:
  FlushDenormals() : before_(control()) { set_control(before_ | kFlush); }
  ~FlushDenormals() { set_control(before_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  // The compiler must not move loads and stores, and with them products, past a change of the register.
#if defined(__x86_64__)
  using Register = uint32_t;
  static constexpr Register kFlush = 0x8040;  // MXCSR: flush to zero, denormals are zeros
  static Register control() { return _mm_getcsr(); }
  static void set_control(Register value) {
    asm volatile("" ::: "memory");
    _mm_setcsr(value);
    asm volatile("" ::: "memory");
  }
#elif defined(__aarch64__)
  using Register = uint64_t;
  static constexpr Register kFlush = 1u << 24;  // FPCR: flush to zero
  static Register control() {
    Register value;
    asm volatile("mrs %0, fpcr" : "=r"(value));
    return value;
  }
  static void set_control(Register value) { asm volatile("msr fpcr, %0" ::"r"(value) : "memory"); }
#else
  using Register = uint32_t;
  static constexpr Register kFlush = 0;
  static Register control() { return 0; }
  static void set_control(Register) {}
#endif

  const Register before_;
};

}  // namespace KVSTRATA_ISA
}  // namespace kvstrata
