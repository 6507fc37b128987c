// Calls that match or change a few blocks keep the GIL, as giving it up costs more than they do; long ones give it up.
// A lock keeps the tree for its writer meanwhile. Nobody waits for the lock with the GIL held, so neither blocks the
// other for ever, nor other threads for long.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "hash_buffer.hpp"
#include "hashing.hpp"
#include "radix.hpp"
#include "readers_writer_lock.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace penstock {
namespace {

constexpr std::size_t kReleaseGilHashes = 2048; // about 100 us of storing or removing

// An int32 array of numpy's own making, which costs a third of wrapping memory of ours.
class IntArray {
  public:
    template <class... Sizes>
    explicit IntArray(Sizes... sizes) : size_((std::size_t{1} * ... * sizes)) {
        static PyObject* const empty = nb::object(nb::module_::import_("numpy").attr("empty")).release().ptr();
        static PyObject* const dtype = nb::object(nb::module_::import_("numpy").attr("dtype")("int32")).release().ptr();
        nb::object shape;
        if constexpr (sizeof...(sizes) == 1) {
            shape = nb::int_(sizes...);
        } else {
            shape = nb::make_tuple(sizes...);
        }
        PyObject* arguments[] = {shape.ptr(), dtype};
        array_ = nb::steal(PyObject_Vectorcall(empty, arguments, 2, nullptr));
        Py_buffer buffer;
        if (!array_.is_valid() || PyObject_GetBuffer(array_.ptr(), &buffer, PyBUF_WRITABLE) != 0) {
            throw nb::python_error();
        }
        data_ = static_cast<std::int32_t*>(buffer.buf);
        PyBuffer_Release(&buffer); // the array itself keeps its memory
        std::fill_n(data_, size_, 0);
    }

    std::span<std::int32_t> values() const { return {data_, size_}; }
    nb::object array() const { return array_; }

  private:
    std::size_t size_;
    nb::object array_;
    std::int32_t* data_;
};

// What `match` gives: `tiers` is made when it is asked for where all lies on the device.
class PrefixMatch {
  public:
    // Of one prefix.
    explicit PrefixMatch(std::size_t num_slots) : depths_(num_slots), num_slots_(num_slots) {}

    // Of several: they have a dimension in front.
    PrefixMatch(std::size_t num_rows, std::size_t num_slots)
        : depths_(num_rows, num_slots), num_slots_(num_slots), num_rows_(num_rows) {}

    nb::object depths() const { return depths_.array(); }

    nb::object tiers() {
        if (!tiers_) {
            add_tiers();
            for (std::size_t row = 0; row < num_rows_.value_or(1); ++row) {
                std::ranges::copy(row_depths(row), row_tiers(row));
            }
        }
        return tiers_->array();
    }

    // Take zeros for each prefix, to be filled in.
    void add_tiers() {
        tiers_ = num_rows_ ? IntArray(*num_rows_, kTiers, num_slots_) : IntArray(kTiers, num_slots_);
    }

    std::span<std::int32_t> row_depths(std::size_t row) const {
        return depths_.values().subspan(row * num_slots_, num_slots_);
    }

    // None where all lies on the device.
    std::int32_t* row_tiers(std::size_t row) const {
        return tiers_ ? tiers_->values().data() + row * kTiers * num_slots_ : nullptr;
    }

  private:
    IntArray depths_;
    std::optional<IntArray> tiers_;
    std::size_t num_slots_;
    std::optional<std::size_t> num_rows_;
};

// The tree and its lock.
class GuardedTree {
  public:
    GuardedTree(std::optional<std::size_t> pairs_max, std::uint32_t num_slots)
        : tree_(pairs_max.value_or(SIZE_MAX), num_slots) {}

  protected:
    template <class Call>
    auto read(std::size_t num_hashes, const Call& call) {
        return locked<std::shared_lock<ReadersWriterLock>>(num_hashes, call);
    }

    template <class Call>
    auto write(std::size_t num_hashes, const Call& call) {
        return locked<std::unique_lock<ReadersWriterLock>>(num_hashes, call);
    }

    template <class Lock, class Call>
    auto locked(std::size_t num_hashes, const Call& call) {
        if (num_hashes < kReleaseGilHashes) {
            const Lock lock(lock_, std::try_to_lock);
            if (lock.owns_lock()) {
                return call();
            }
        }
        const nb::gil_scoped_release release;
        const Lock lock(lock_);
        return call();
    }

    ReadersWriterLock lock_;
    RadixTree tree_;
};

// What Python sees of it.
class LockedTree : GuardedTree {
  public:
    using GuardedTree::GuardedTree;

    void store(std::uint32_t worker, nb::handle hashes, std::optional<std::uint64_t> parent, nb::handle tier) {
        const HashBuffer buffer(hashes);
        const std::size_t parsed_tier = parse_tier(tier);
        write(buffer.view().size(), [&] { tree_.store(worker, buffer.view(), parent, parsed_tier); });
    }

    void remove(std::uint32_t worker, nb::handle hashes, nb::handle tier) {
        const HashBuffer buffer(hashes);
        const std::size_t parsed_tier = parse_tier(tier);
        write(buffer.view().size(), [&] { tree_.remove(worker, buffer.view(), parsed_tier); });
    }

    void clear(std::uint32_t worker) {
        write(0, [&] { tree_.clear(worker); });
    }

    bool reclaim(std::size_t blocks) {
        return write(blocks, [&] { return tree_.reclaim(blocks); });
    }

    void allow(std::size_t pairs_max) {
        write(0, [&] { tree_.allow(pairs_max); });
    }

    void grow(std::uint32_t num_slots) {
        write(0, [&] { tree_.grow(num_slots); });
    }

    void share(std::uint32_t worker, std::vector<std::uint32_t> sources) {
        write(0, [&] { tree_.share(worker, std::move(sources)); });
    }

    PrefixMatch match(nb::handle hashes) {
        const HashBuffer buffer(hashes);
        PrefixMatch result = prepare();
        read(buffer.view().size(),
             [&] { match_row(buffer.view(), result, 0, tree_.claim_stamps(1)); });
        return result;
    }

    PrefixMatch match_many(const nb::sequence& queries) {
        std::vector<HashBuffer> buffers;
        buffers.reserve(nb::len(queries));
        for (const nb::handle query : queries) {
            buffers.emplace_back(query);
        }
        PrefixMatch result = prepare(buffers.size());
        read(SIZE_MAX, [&] {
            const auto count = static_cast<std::uint32_t>(buffers.size());
            const std::uint32_t stamp = tree_.claim_stamps(count);
            for (std::uint32_t i = 0; i < count; ++i) {
                match_row(buffers[i].view(), result, i, stamp + i);
            }
        });
        return result;
    }

    PrefixMatch match_tokens(const nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& tokens,
                             std::size_t block_size, std::pair<std::uint64_t, std::uint64_t> first,
                             const nb::bytes& key_bytes) {
        Key key;
        if (block_size == 0 || key_bytes.size() != sizeof key) {
            throw nb::value_error("block_size: must be >= 1, and key of 16 bytes");
        }
        std::memcpy(&key, key_bytes.data(), sizeof key);
        const std::size_t num_blocks = tokens.size() / block_size;
        const auto hashes = std::make_unique_for_overwrite<Hash[]>(num_blocks);
        const HashView view(hashes.get(), sizeof(Hash), num_blocks);
        PrefixMatch result = prepare();
        read(SIZE_MAX, [&] {
            block_hashes({tokens.data(), tokens.size()}, block_size, {first.first, first.second}, {}, key,
                         {hashes.get(), num_blocks});
            match_row(view, result, 0, tree_.claim_stamps(1));
        });
        return result;
    }

    std::size_t num_slots() {
        return read(0, [&] { return tree_.num_slots(); });
    }

    std::size_t held_blocks(std::uint32_t worker) {
        return read(0, [&] { return tree_.held_blocks(worker); });
    }

    nb::tuple counts() {
        const RadixStats stats = read(0, [&] { return tree_.stats(); });
        return nb::make_tuple(stats.nodes, stats.pairs, stats.evicted_pairs, stats.unknown_removals,
                              stats.contradictions, stats.bytes);
    }

    nb::object runs(std::uint32_t worker) {
        const auto [hashes, runs] = read(SIZE_MAX, [&] { return tree_.runs(worker); });
        return as_list(hashes, runs);
    }

    void check() {
        try {
            read(SIZE_MAX, [&] { tree_.check(); });
        } catch (const std::logic_error& broken) {
            PyErr_SetString(PyExc_AssertionError, broken.what());
            throw nb::python_error();
        }
    }

  private:
    void match_row(HashView hashes, PrefixMatch& result, std::size_t row, std::uint32_t stamp) const {
        tree_.match(hashes, result.row_depths(row), result.row_tiers(row), stamp);
    }

    template <class... Rows>
    PrefixMatch prepare(Rows... rows) {
        const auto [num_slots, has_tiers] = read(0, [&] {
            return std::pair<std::size_t, bool>(tree_.num_slots(), tree_.has_lower_tiers());
        });
        PrefixMatch result(rows..., num_slots);
        if (has_tiers) {
            result.add_tiers();
        }
        return result;
    }
};

}  // namespace

void bind_radix(nb::module_& module);

void bind_radix(nb::module_& module) {
    nb::class_<PrefixMatch>(module, "PrefixMatch")
        .def_prop_ro("depths", &PrefixMatch::depths)
        .def_prop_ro("tiers", &PrefixMatch::tiers);
    nb::class_<LockedTree>(module, "RadixTree")
        .def(nb::init<std::optional<std::size_t>, std::uint32_t>(), "pairs_max"_a.none(), "num_slots"_a = 1)
        .def_prop_ro("num_slots", &LockedTree::num_slots)
        .def("grow", &LockedTree::grow, "num_slots"_a)
        .def("share", &LockedTree::share, "worker"_a, "sources"_a)
        .def("allow", &LockedTree::allow, "pairs_max"_a)
        .def("store", &LockedTree::store, "worker"_a, "hashes"_a, "parent"_a = nb::none(), "tier"_a = "device")
        .def("remove", &LockedTree::remove, "worker"_a, "hashes"_a, "tier"_a = "device")
        .def("clear", &LockedTree::clear, "worker"_a)
        .def("reclaim", &LockedTree::reclaim, "blocks"_a)
        .def("match", &LockedTree::match, "hashes"_a)
        .def("match_many", &LockedTree::match_many, "queries"_a)
        .def("match_packed_tokens", &LockedTree::match_tokens, "tokens"_a, "block_size"_a, "first"_a, "key"_a)
        .def("held_blocks", &LockedTree::held_blocks, "worker"_a)
        .def("counts", &LockedTree::counts)
        .def("runs", &LockedTree::runs, "worker"_a)
        .def("check", &LockedTree::check);
}

}  // namespace penstock
