// torch.ops.kvstrata.chain_keys on the CPU: SHA-256 (FIPS 180-4) of each block's content after its parent's key.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "checks.h"
#include "dispatch.h"
#include "keys/sha256.h"

namespace kvstrata {
namespace {

// FIPS 180-4 section 5.3.3: the first 32 bits of the fractional parts of the square roots of the first 8 primes.
constexpr uint32_t kInitial[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                  0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

// The message of one key: the parent's key, the block's content, then padding (section 5.1.1).
class Message {
 public:
  explicit Message(size_t content_bytes) : content_bytes_(content_bytes) {}

  void set(const uint8_t* parent, size_t parent_bytes, const uint8_t* content) {
    if (parent_bytes != parent_bytes_ || padded_.empty()) lay_out(parent_bytes);
    std::copy_n(parent, parent_bytes, padded_.data());
    std::copy_n(content, content_bytes_, padded_.data() + parent_bytes);
  }

  const uint8_t* blocks() const { return padded_.data(); }
  size_t num_blocks() const { return padded_.size() / kSha256BlockBytes; }

 private:
  void lay_out(size_t parent_bytes) {
    parent_bytes_ = parent_bytes;
    const size_t length = parent_bytes + content_bytes_;
    const size_t blocks = (length + kSha256LengthBytes) / kSha256BlockBytes + 1;
    padded_.assign(blocks * kSha256BlockBytes, 0);
    padded_[length] = 0x80;
    for (size_t i = 0; i < kSha256LengthBytes; ++i)
      padded_[padded_.size() - 1 - i] = static_cast<uint8_t>(uint64_t{length} * 8 >> (8 * i));
  }

  size_t content_bytes_;
  size_t parent_bytes_ = 0;
  std::vector<uint8_t> padded_;
};

void write_digest(const uint32_t state[8], uint8_t* digest, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) digest[i] = static_cast<uint8_t>(state[i / 4] >> (24 - 8 * (i % 4)));
}

Sha256Compress compress_function() {
  const Sha256Compress instructions = current_isa() == Isa::portable ? nullptr : sha256_compress_instructions();
  return instructions != nullptr ? instructions : sha256_compress_portable;
}

void check_bytes(const char* name, const at::Tensor& tensor, std::initializer_list<Axis> axes) {
  check_dtype("chain_keys", name, tensor, at::kByte);
  check_shape("chain_keys", name, tensor, axes);
  check_contiguous("chain_keys", name, tensor);
}

at::Tensor chain_keys(const at::Tensor& parent, const at::Tensor& contents, int64_t key_bytes) {
  check_bytes("parent", parent, {"parent_bytes"});
  check_bytes("contents", contents, {"num_blocks", "content_bytes"});
  TORCH_CHECK_VALUE(key_bytes >= 1 && key_bytes <= static_cast<int64_t>(kSha256Bytes), "chain_keys: key_bytes is ",
                    key_bytes, ", expected 1 to ", kSha256Bytes);
  at::Tensor keys = at::empty({contents.size(0), key_bytes}, contents.options());
  const Sha256Compress compress = compress_function();
  Message message(contents.size(1));
  const uint8_t* before = parent.const_data_ptr<uint8_t>();
  size_t before_bytes = parent.size(0);
  const uint8_t* content = contents.const_data_ptr<uint8_t>();
  uint8_t* key = keys.data_ptr<uint8_t>();
  for (int64_t block = 0; block < contents.size(0); ++block) {
    message.set(before, before_bytes, content);
    uint32_t state[8];
    std::copy_n(kInitial, 8, state);
    compress(state, message.blocks(), message.num_blocks());
    write_digest(state, key, key_bytes);
    before = key;
    before_bytes = key_bytes;
    content += contents.size(1);
    key += key_bytes;
  }
  return keys;
}

}  // namespace

TORCH_LIBRARY_IMPL(kvstrata, CPU, m) { m.impl("chain_keys", chain_keys); }

}  // namespace kvstrata
