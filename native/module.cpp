// The Python module penstock._native; its signatures are in src/penstock/_native.pyi.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "attention.hpp"
#include "derived.hpp"
#include "hashing.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace penstock {

void bind_content(nb::module_& module);
void bind_jump_scheduler(nb::module_& module);
void bind_pool(nb::module_& module);
void bind_radix(nb::module_& module);
void bind_ranges(nb::module_& module);
void bind_seconds(nb::module_& module);
void bind_direct_streams(nb::module_& module);
void bind_event_queue(nb::module_& module);

}  // namespace penstock

namespace {

using penstock::Extra;
using penstock::Hash;
using penstock::Key;

using Tokens = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using SharedUnits = nb::ndarray<const std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
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

HashArray as_array(std::unique_ptr<Hash[]> hashes, std::size_t count) {
    Hash* data = hashes.release();
    const nb::capsule owner(data, [](void* pointer) noexcept { delete[] static_cast<Hash*>(pointer); });
    return HashArray(data, {count, 2}, owner);
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
    return as_array(std::move(hashes), num_blocks);
}

HashArray derived_hashes(std::uint64_t own, const SharedUnits& shared, std::uint64_t unit_tokens,
                         std::uint64_t block_size, std::pair<std::uint64_t, std::uint64_t> blocks) {
    const auto [start, end] = blocks;
    if (unit_tokens == 0 || block_size == 0 || end < start) {
        throw nb::value_error("unit_tokens and block_size: must be >= 1, and blocks must not end before they start");
    }
    const std::size_t num_blocks = end - start;
    auto hashes = std::make_unique_for_overwrite<Hash[]>(num_blocks);
    penstock::derived_hashes({own, {shared.data(), shared.size()}, unit_tokens}, block_size, start,
                             {hashes.get(), num_blocks});
    return as_array(std::move(hashes), num_blocks);
}

HashPair siphash128(const nb::bytes& data, const nb::bytes& key) {
    const Hash hash = penstock::siphash128(as_span(data), parse_key(key));
    return {hash.low, hash.high};
}

template <class Element, class... Properties>
using Array = nb::ndarray<Element, nb::c_contig, nb::device::cpu, Properties...>;

template <class Element>
void decode_attention(const Array<const Element, nb::ndim<3>>& query, const Array<const Element, nb::ndim<6>>& storage,
                      std::size_t layer, const Array<const std::int32_t, nb::ndim<2>>& tables,
                      const Array<const std::int64_t, nb::ndim<1>>& lengths, const Array<Element, nb::ndim<3>>& out,
                      std::size_t window, float scale, float softcap) {
    const std::size_t num_blocks = storage.shape(0);
    const std::size_t layer_elements = storage.shape(3) * storage.shape(4) * storage.shape(5);
    const Element* keys = storage.data() + layer * 2 * layer_elements;
    const penstock::DecodeAttention<Element> call{
        .query = query.data(),
        .keys = keys,
        .values = keys + layer_elements,
        .tables = tables.data(),
        .lengths = lengths.data(),
        .out = out.data(),
        .rows = query.shape(0),
        .heads = query.shape(1),
        .kv_heads = storage.shape(4),
        .head_dim = query.shape(2),
        .block_size = storage.shape(3),
        .block_stride = storage.shape(1) * 2 * layer_elements,
        .table_width = tables.shape(1),
        .window = window,
        .scale = scale,
        .softcap = softcap,
    };
    if (layer >= storage.shape(1) || storage.shape(2) != 2 || layer_elements == 0) {
        throw nb::value_error("storage: must be (blocks, layers, 2, block_size, kv_heads, head_dim) with that layer");
    }
    if (call.head_dim != storage.shape(5) || call.head_dim % penstock::kHeadDimStep != 0 ||
        call.heads % call.kv_heads != 0) {
        throw nb::value_error("query: heads must be a multiple of kv_heads, head_dim the storage's and one of 16");
    }
    if (out.shape(0) != call.rows || out.shape(1) != call.heads || out.shape(2) != call.head_dim ||
        tables.shape(0) != call.rows || lengths.shape(0) != call.rows) {
        throw nb::value_error("query, out, tables and lengths: must have as many rows, and out the shape of query");
    }
    for (std::size_t row = 0; row < call.rows; ++row) {
        const std::int64_t length = call.lengths[row];
        if (length < 1 || static_cast<std::size_t>(length) > call.table_width * call.block_size) {
            throw nb::value_error("lengths: must be >= 1 and within the row's table");
        }
        const std::size_t used = (static_cast<std::size_t>(length) - 1) / call.block_size + 1;
        for (std::size_t at = 0; at < used; ++at) {
            const std::int32_t block = call.tables[row * call.table_width + at];
            if (block < 0 || static_cast<std::size_t>(block) >= num_blocks) {
                throw nb::value_error("tables: a block id is out of range");
            }
        }
    }
    const nb::gil_scoped_release release;
    penstock::decode_attention(call);
}

}  // namespace

NB_MODULE(_native, module) {
    nb::set_leak_warnings(false); // a tree that Python still holds at its end is none
    module.def("block_hashes", &block_hashes, nb::arg("tokens").noconvert(), "block_size"_a, "first"_a, "extra"_a,
               "key"_a);
    module.attr("implementation") = penstock::implementations().front().name;
    module.def("decode_attention", &decode_attention<float>, "query"_a.noconvert(), "storage"_a.noconvert(), "layer"_a,
               "tables"_a.noconvert(), "lengths"_a.noconvert(), "out"_a.noconvert(), "window"_a, "scale"_a,
               "softcap"_a);
    module.def("decode_attention", &decode_attention<std::uint16_t>, "query"_a.noconvert(), "storage"_a.noconvert(),
               "layer"_a, "tables"_a.noconvert(), "lengths"_a.noconvert(), "out"_a.noconvert(), "window"_a, "scale"_a,
               "softcap"_a);
    module.def("derived_hashes", &derived_hashes, "own"_a, "shared"_a, "unit_tokens"_a, "block_size"_a,
               "blocks"_a);
    module.def("siphash128", &siphash128, "data"_a, "key"_a);
    penstock::bind_content(module);
    penstock::bind_pool(module);
    penstock::bind_jump_scheduler(module);
    penstock::bind_radix(module);
    penstock::bind_ranges(module);
    penstock::bind_seconds(module);
    penstock::bind_direct_streams(module);
    penstock::bind_event_queue(module);
}
