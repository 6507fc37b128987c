// The class penstock._native.Pool.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <limits>
#include <string>

#include "pool.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace penstock {
namespace {

using Hashes = nb::ndarray<const std::uint64_t, nb::shape<-1, 2>, nb::c_contig, nb::device::cpu>;
using Ids = std::vector<BlockId>;

static_assert(sizeof(Hash) == 2 * sizeof(std::uint64_t), "a row of an array is a hash");

std::span<const Hash> as_span(const Hashes& hashes) {
    return {reinterpret_cast<const Hash*>(hashes.data()), hashes.shape(0)};
}

template <class T>
nb::bytes as_bytes(const std::vector<T>& values) {
    return nb::bytes(values.data(), values.size() * sizeof(T));
}

nb::list take_changes(Pool& pool) {
    nb::list changes;
    for (const Change& change : pool.take_changes()) {
        changes.append(nb::make_tuple(static_cast<int>(change.kind), as_bytes(change.hashes), change.parent));
    }
    return changes;
}

nb::list as_list(const std::vector<GivenUp>& given_up) {
    nb::list chains;
    for (const GivenUp& gone : given_up) {
        chains.append(nb::make_tuple(gone.ids, as_bytes(gone.hashes), gone.parent));
    }
    return chains;
}

// A use of blocks at their release; without a kind there was none.
void release(Pool& pool, const Ids& ids, std::optional<int> kind, int priority, double until_s,
             std::uint64_t tenant) {
    if (!kind) {
        pool.release(ids);
        return;
    }
    if (*kind < 0 || *kind >= static_cast<int>(ReuseTable::kKinds) || priority < -8 || priority > 7 ||
        std::isnan(until_s)) {
        throw std::invalid_argument("use: needs a kind from 0 to 2, a priority from -8 to 7 and a time, got " +
                                    std::to_string(*kind) + ", " + std::to_string(priority) + " and " +
                                    std::to_string(until_s));
    }
    pool.release(ids, BlockUse{static_cast<std::uint8_t>(*kind), static_cast<std::int8_t>(priority), until_s, tenant});
}

nb::dict references(const Pool& pool) {
    nb::dict held;
    for (const auto& [id, count] : pool.references()) {
        held[nb::int_(id)] = count;
    }
    return held;
}

}  // namespace

void bind_pool(nb::module_& module) {
    nb::register_exception_translator([](const std::exception_ptr& error, void*) {
        try {
            std::rethrow_exception(error);
        } catch (const Broken& broken) {
            PyErr_SetString(PyExc_AssertionError, broken.what());
        }
    });
    nb::class_<Pool>(module, "Pool")
        .def(nb::init<std::size_t>(), "num_blocks"_a)
        .def(
            "__init__",
            [](Pool* self, std::size_t num_blocks, const std::string& policy, std::size_t block_size, double token_s,
               double deeper_s, double load_s, std::size_t tenant_blocks) {
                new (self) Pool(num_blocks, policy_named(policy), block_size, {token_s, deeper_s, load_s}, tenant_blocks);
            },
            "num_blocks"_a, "policy"_a, "block_size"_a, "token_s"_a, "deeper_s"_a, "load_s"_a, "tenant_blocks"_a)
        .def_prop_ro("num_available", &Pool::num_available)
        .def_prop_ro("num_active", &Pool::num_active)
        .def_prop_ro("num_cached", &Pool::num_cached)
        .def("match", [](const Pool& pool, const Hashes& hashes) { return pool.match(as_span(hashes)); }, "hashes"_a)
        .def("count_idle", [](const Pool& pool, const Ids& ids) { return pool.count_idle(ids); }, "ids"_a)
        .def("acquire", [](Pool& pool, const Ids& ids) { pool.acquire(ids); }, "ids"_a)
        .def("make_room", [](Pool& pool, std::size_t count) { return as_list(pool.make_room(count)); }, "count"_a)
        .def("allocate", &Pool::allocate, "count"_a)
        .def("release", &release, "ids"_a, "kind"_a.none() = nb::none(), "priority"_a = 0,
             "until_s"_a = std::numeric_limits<double>::infinity(), "tenant"_a = 0)
        .def(
            "set_price",
            [](Pool& pool, double token_s, double deeper_s, double load_s) {
                pool.set_price({token_s, deeper_s, load_s});
            },
            "token_s"_a, "deeper_s"_a, "load_s"_a)
        .def("expire", &Pool::expire, "now_s"_a, "most"_a)
        .def(
            "commit",
            [](Pool& pool, const Ids& ids, const Hashes& hashes, std::optional<std::uint64_t> parent) {
                pool.commit(ids, as_span(hashes), parent);
            },
            "ids"_a, "hashes"_a, "parent"_a.none())
        .def("forget", [](Pool& pool, const Ids& ids) { pool.forget(ids); }, "ids"_a)
        .def("reset", &Pool::reset)
        .def("take_changes", &take_changes)
        .def("resident_hashes", [](const Pool& pool) { return as_bytes(pool.resident_hashes()); })
        .def("idle_blocks", &Pool::idle_blocks)
        .def("references", &references)
        .def("check", &Pool::check);
}

}  // namespace penstock
