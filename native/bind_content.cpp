// The class penstock._native.Content.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <stdexcept>

#include "content.hpp"
#include "hash_buffer.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace penstock {
namespace {

void store(Content& content, nb::handle hashes, std::optional<std::uint64_t> parent, nb::handle tier) {
    const HashBuffer buffer(hashes);
    content.store(buffer.view(), parent, parse_tier(tier));
}

void remove(Content& content, nb::handle hashes, nb::handle tier) {
    const HashBuffer buffer(hashes);
    content.remove(buffer.view(), parse_tier(tier));
}

nb::list next(ContentWalk& walk, std::size_t steps) {
    const auto [hashes, runs] = walk.next(steps);
    return as_list(hashes, runs);
}

void check(const Content& content) {
    try {
        content.check();
    } catch (const std::logic_error& broken) {
        PyErr_SetString(PyExc_AssertionError, broken.what());
        throw nb::python_error();
    }
}

}  // namespace

void bind_content(nb::module_& module);

void bind_content(nb::module_& module) {
    nb::class_<ContentWalk>(module, "ContentWalk")
        .def("next", &next, "steps"_a)
        .def_prop_ro("is_done", &ContentWalk::is_done);
    nb::class_<Content>(module, "Content")
        .def(nb::init<>())
        .def("__len__", &Content::size)
        .def_prop_ro("unknown_removals", &Content::unknown_removals)
        .def("store", &store, "hashes"_a, "parent"_a.none(), "tier"_a)
        .def("remove", &remove, "hashes"_a, "tier"_a)
        .def("clear", [](Content& content) { content.clear(); })
        .def("walk", &Content::walk)
        .def("check", &check);
}

}  // namespace penstock
