// The Python module penstock._native; its signatures are in src/penstock/_native.pyi.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "hashing.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using penstock::Extra;
using penstock::Hash;
using penstock::Key;

using Tokens = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using HashArray = nb::ndarray<nb::numpy, std::uint64_t, nb::shape<-1, 2>, nb::c_contig>;
using HashPair = std::pair<std::uint64_t, std::uint64_t>;

// About 50 us of hashing: giving up the GIL for less costs more than it frees.
constexpr std::size_t kReleaseGilTokens = 32'768;

std::span<const std::uint8_t> as_span(const nb::bytes& bytes) {
    return {static_cast<const std::uint8_t*>(bytes.data()), bytes.size()};
}

Key parse_key(const nb::bytes& bytes) {
    Key key;
    if (bytes.size() != sizeof key) {
        throw nb::value_error("key: must be 16 bytes");
    }
    std::memcpy(&key, bytes.data(), sizeof key);
    return key;
}

std::vector<Extra> parse_extras(const nb::dict& by_block) {
    std::vector<Extra> extras;
    for (const auto& [block, bytes] : by_block) {
        extras.push_back({nb::cast<std::size_t>(block), as_span(nb::cast<nb::bytes>(bytes))});
    }
    std::ranges::sort(extras, {}, &Extra::block);
    return extras;
}

HashArray block_hashes(const Tokens& tokens, std::size_t block_size, HashPair first, const nb::dict& extra,
                       const nb::bytes& key_bytes) {
    if (block_size == 0) {
        throw nb::value_error("block_size: must be >= 1, got 0");
    }
    const Key key = parse_key(key_bytes);
    const std::vector<Extra> extras = parse_extras(extra);
    const std::size_t num_blocks = tokens.size() / block_size;
    auto hashes = std::make_unique_for_overwrite<Hash[]>(num_blocks);
    const auto run = [&] {
        penstock::block_hashes({tokens.data(), tokens.size()}, block_size, {first.first, first.second}, extras, key,
                               {hashes.get(), num_blocks});
    };
    if (tokens.size() >= kReleaseGilTokens) {
        const nb::gil_scoped_release release;
        run();
    } else {
        run();
    }
    Hash* data = hashes.release();
    const nb::capsule owner(data, [](void* pointer) noexcept { delete[] static_cast<Hash*>(pointer); });
    return HashArray(data, {num_blocks, 2}, owner);
}

HashPair siphash128(const nb::bytes& data, const nb::bytes& key) {
    const Hash hash = penstock::siphash128(as_span(data), parse_key(key));
    return {hash.low, hash.high};
}

}  // namespace

NB_MODULE(_native, module) {
    module.def("block_hashes", &block_hashes, nb::arg("tokens").noconvert(), "block_size"_a, "first"_a, "extra"_a,
               "key"_a);
    module.attr("implementation") = penstock::implementations().front().name;
    module.def("siphash128", &siphash128, "data"_a, "key"_a);
}
