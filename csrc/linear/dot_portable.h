// Integer steps of the product in plain C++. Included by multiply.h only.
//
// They stay functions: inlined into an unrolled block they would take a compiler minutes.
#pragma once

#define KVSTRATA_FUNCTION __attribute__((noinline))

constexpr int kMaxRows = rows_within_limit(2);
constexpr int kMaxTiles = 1;
template <class Kind>
constexpr int64_t kDirectBlocks = 3;

struct Word {
  int8_t v[4];
};
KVSTRATA_FUNCTION Word broadcast(const int8_t* p) {
  Word word;
  memcpy(word.v, p, 4);
  return word;
}

template <class Kind>
struct Codes {
  uint8_t v[64];
};
template <class Kind>
struct Dot {
  int32_t v[16];
};

template <class Kind>
KVSTRATA_FUNCTION Dot<Kind> begin(int32_t start) {
  Dot<Kind> dot;
  for (int i = 0; i < 16; ++i) dot.v[i] = start;
  return dot;
}
template <class Kind>
KVSTRATA_FUNCTION void step(Dot<Kind>& dot, const Codes<Kind>& codes, Word x) {
  for (int i = 0; i < 16; ++i) {
    dot.v[i] += codes.v[4 * i] * x.v[0] + codes.v[4 * i + 1] * x.v[1] + codes.v[4 * i + 2] * x.v[2] +
                codes.v[4 * i + 3] * x.v[3];
  }
}
template <class Kind>
KVSTRATA_FUNCTION F16 finish(const Dot<Kind>& dot, int32_t) {
  F16 r;
  for (int i = 0; i < 16; ++i) r.v[i] = static_cast<float>(dot.v[i]);
  return r;
}

// Codes as a tile stores them.
KVSTRATA_FUNCTION Codes<Bytes> load_byte_codes(const uint8_t* p) {
  Codes<Bytes> codes;
  memcpy(codes.v, p, 64);
  return codes;
}
template <bool kHigh>
KVSTRATA_FUNCTION Codes<Nibbles> load_nibble_codes(const uint8_t* p) {
  Codes<Nibbles> codes;
  for (int i = 0; i < 64; ++i) codes.v[i] = static_cast<uint8_t>(kHigh ? p[i] >> 4 : p[i] & 15);
  return codes;
}
template <bool kHigh, int kField>
KVSTRATA_FUNCTION Codes<Sixes> load_six_codes(const uint8_t* low, const uint8_t* high) {
  Codes<Sixes> codes;
  for (int i = 0; i < 64; ++i) {
    const int nibble = kHigh ? low[i] >> 4 : low[i] & 15;
    codes.v[i] = static_cast<uint8_t>(nibble | (high[i] >> (2 * kField) & 3) << 4);
  }
  return codes;
}

// Codes as the scratch holds them.
template <class Kind>
KVSTRATA_FUNCTION Codes<Kind> load_codes(const uint8_t* p) {
  Codes<Kind> codes;
  memcpy(codes.v, p, 64);
  return codes;
}
template <class Kind>
KVSTRATA_FUNCTION void store_codes(uint8_t* p, const Codes<Kind>& codes) {
  memcpy(p, codes.v, 64);
}

KVSTRATA_FUNCTION F16 from_u8(const uint8_t* p) {
  F16 r;
  for (int i = 0; i < 16; ++i) r.v[i] = static_cast<float>(p[i]);
  return r;
}
KVSTRATA_FUNCTION F16 from_i8(const uint8_t* p) {
  F16 r;
  for (int i = 0; i < 16; ++i) r.v[i] = static_cast<float>(static_cast<int8_t>(p[i]));
  return r;
}

// The largest magnitude of 32 floats as the bits of a float: ordered like integers, NaN above all.
KVSTRATA_FUNCTION uint32_t largest_bits(F16 a, F16 b) {
  uint32_t largest = 0;
  for (int i = 0; i < 16; ++i) {
    const uint32_t x = bits_of(a.v[i]) & 0x7fffffffu;
    const uint32_t y = bits_of(b.v[i]) & 0x7fffffffu;
    largest = x > largest ? x : largest;
    largest = y > largest ? y : largest;
  }
  return largest;
}
// Rounds to the nearest integer, ties to even, stores 16 codes and returns their sum.
KVSTRATA_FUNCTION int32_t store_rounded(int8_t* p, F16 a) {
  constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  int32_t sum = 0;
  for (int i = 0; i < 16; ++i) {
    const int32_t rounded = static_cast<int32_t>((a.v[i] + kRounder) - kRounder);
    p[i] = static_cast<int8_t>(rounded);
    sum += rounded;
  }
  return sum;
}
