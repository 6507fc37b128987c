// Fuzz target: every implementation of block_hashes against a second, straightforward one written from the paper.
// With Clang it is a libFuzzer target; elsewhere fuzz_main.cpp feeds it.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "hashing.hpp"

namespace {

using Bytes = std::vector<std::uint8_t>;

std::uint64_t rotated(std::uint64_t x, unsigned bits) { return (x << bits) | (x >> (64 - bits)); }

void sip_round(std::uint64_t (&v)[4]) {
    v[0] += v[1];
    v[1] = rotated(v[1], 13) ^ v[0];
    v[0] = rotated(v[0], 32);
    v[2] += v[3];
    v[3] = rotated(v[3], 16) ^ v[2];
    v[0] += v[3];
    v[3] = rotated(v[3], 21) ^ v[0];
    v[2] += v[1];
    v[1] = rotated(v[1], 17) ^ v[2];
    v[2] = rotated(v[2], 32);
}

penstock::Hash straightforward_siphash128(Bytes message, penstock::Key key) {
    std::uint64_t v[4] = {key.k0 ^ 0x736f6d6570736575, key.k1 ^ 0x646f72616e646f6d, key.k0 ^ 0x6c7967656e657261,
                          key.k1 ^ 0x7465646279746573};
    v[1] ^= 0xee;
    const auto length = static_cast<std::uint8_t>(message.size());
    message.resize(message.size() / 8 * 8 + 7);
    message.push_back(length);
    for (std::size_t at = 0; at < message.size(); at += 8) {
        std::uint64_t word = 0;
        for (std::size_t i = 8; i-- > 0;) {
            word = word << 8 | message[at + i];
        }
        v[3] ^= word;
        sip_round(v);
        sip_round(v);
        v[0] ^= word;
    }
    v[2] ^= 0xee;
    for (int i = 0; i < 4; ++i) {
        sip_round(v);
    }
    const std::uint64_t low = v[0] ^ v[1] ^ v[2] ^ v[3];
    v[1] ^= 0xdd;
    for (int i = 0; i < 4; ++i) {
        sip_round(v);
    }
    return {low, v[0] ^ v[1] ^ v[2] ^ v[3]};
}

template <class T>
void append(Bytes& message, const T* values, std::size_t count) {
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(values);
    message.insert(message.end(), bytes, bytes + count * sizeof(T));
}

void require_equal(penstock::Hash got, penstock::Hash expected, const char* what, std::size_t block,
                   std::size_t block_size) {
    if (got.low != expected.low || got.high != expected.high) {
        std::fprintf(stderr, "%s differs at block %zu of block size %zu\n", what, block, block_size);
        std::abort();
    }
}

// Takes values off the front of the fuzzer's bytes; zeros once they are used up.
class Input {
  public:
    explicit Input(std::span<const std::uint8_t> bytes) : bytes_(bytes) {}

    template <class T>
    T take() {
        T value{};
        const auto piece = take_bytes(sizeof value);
        std::memcpy(&value, piece.data(), piece.size());
        return value;
    }

    std::span<const std::uint8_t> take_bytes(std::size_t count) {
        const auto piece = bytes_.first(std::min(count, bytes_.size()));
        bytes_ = bytes_.subspan(piece.size());
        return piece;
    }

    std::size_t size() const { return bytes_.size(); }

  private:
    std::span<const std::uint8_t> bytes_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    Input input({data, size});
    const auto key = input.take<penstock::Key>();
    const auto first = input.take<penstock::Hash>();
    const std::size_t block_size = input.take<std::uint8_t>() % 40 + 1;

    // Exact heap copies, so that ASan sees a read of one byte too many.
    std::vector<Bytes> contents;
    std::vector<std::size_t> blocks;
    for (std::size_t count = input.take<std::uint8_t>() % 4; count-- > 0;) {
        blocks.push_back((blocks.empty() ? 0 : blocks.back() + 1) + input.take<std::uint8_t>() % 8);
        const auto piece = input.take_bytes(input.take<std::uint8_t>() % 48);
        contents.emplace_back(piece.begin(), piece.end());
    }
    std::vector<penstock::Extra> extras;
    for (std::size_t i = 0; i < blocks.size(); ++i) {
        extras.push_back({blocks[i], contents[i]});
    }
    const std::size_t num_tokens = input.size() / sizeof(std::int32_t);
    const auto tokens = std::make_unique<std::int32_t[]>(num_tokens);
    for (std::size_t i = 0; i < num_tokens; ++i) {
        tokens[i] = input.take<std::int32_t>();
    }

    std::vector<penstock::Hash> expected;
    penstock::Hash parent = first;
    for (std::size_t block = 0; block < num_tokens / block_size; ++block) {
        Bytes message;
        append(message, tokens.get() + block * block_size, block_size);
        for (const auto& extra : extras) {
            if (extra.block == block) {
                append(message, extra.bytes.data(), extra.bytes.size());
            }
        }
        append(message, &parent, 1);
        parent = straightforward_siphash128(message, key);
        require_equal(penstock::siphash128(message, key), parent, "siphash128", block, block_size);
        expected.push_back(parent);
    }
    for (const auto& implementation : penstock::implementations()) {
        std::vector<penstock::Hash> got(expected.size());
        implementation.block_hashes({tokens.get(), num_tokens}, block_size, first, extras, key, got);
        for (std::size_t block = 0; block < got.size(); ++block) {
            require_equal(got[block], expected[block], implementation.name, block, block_size);
        }
    }
    return 0;
}
