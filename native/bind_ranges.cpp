// The functions of penstock._native that move, check and merge ranges of memory.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "checksum.hpp"
#include "ranges.hpp"
#include "stream.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace penstock {
namespace {

using Numbers = nb::ndarray<const std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using NumberArray = nb::ndarray<nb::numpy, std::uint64_t, nb::ndim<1>, nb::c_contig>;
using Flag = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Result = std::pair<std::uint64_t, int>;

// A few microseconds of copying: giving up the GIL for less costs more than it frees.
constexpr std::uint64_t kReleaseGilBytes = 64U << 10U;

Column as_column(const Numbers& numbers) { return {numbers.data(), numbers.size()}; }

void expect_size(const Numbers& column, const char* name, std::size_t size) {
    if (column.size() != size) {
        const std::string text = std::string(name) + ": " + std::to_string(column.size()) + " of them for " +
                                 std::to_string(size) + " lengths";
        throw nb::value_error(text.c_str());
    }
}

bool is_long(const Numbers& lengths) {
    std::uint64_t total = 0;
    for (const std::uint64_t bytes : as_column(lengths)) {
        total += bytes;
        if (total >= kReleaseGilBytes) {
            return true;
        }
    }
    return false;
}

template <class Call>
auto without_gil(bool release, Call call) {
    std::optional<nb::gil_scoped_release> released;
    if (release) {
        released.emplace();
    }
    return call();
}

Stop as_stop(const std::optional<Flag>& stop) {
    if (stop && stop->size() != 1) {
        throw nb::value_error("stop: must be one byte");
    }
    return stop ? stop->data() : nullptr;
}

bool copy(const Numbers& targets, const Numbers& sources, const Numbers& lengths, std::size_t threads,
          const std::optional<Flag>& stop) {
    expect_size(targets, "targets", lengths.size());
    expect_size(sources, "sources", lengths.size());
    return without_gil(is_long(lengths), [&, flag = as_stop(stop)] {
        return copy_ranges(as_column(targets), as_column(sources), as_column(lengths), threads, flag);
    });
}

template <Direction kDirection>
Result move_process(int pid, const Numbers& local, const Numbers& remote, const Numbers& lengths,
                    std::size_t threads, const std::optional<Flag>& stop) {
    expect_size(local, "local", lengths.size());
    expect_size(remote, "remote", lengths.size());
    const Moved moved = without_gil(is_long(lengths), [&, flag = as_stop(stop)] {
        return move_between_processes(kDirection, pid, as_column(local), as_column(remote), as_column(lengths),
                                      threads, flag);
    });
    return {moved.bytes, moved.error};
}

std::ptrdiff_t check_bounds(const Numbers& offsets, const Numbers& lengths, std::uint64_t size) {
    expect_size(offsets, "offsets", lengths.size());
    return first_outside(as_column(offsets), as_column(lengths), size);
}

// Columns that lie one after the other in one allocation, which they own together.
template <std::size_t kColumns>
class Owned {
public:
    explicit Owned(std::size_t rows) : rows_(rows), data_(new std::uint64_t[kColumns * rows]) {
        owner_ = nb::capsule(data_, [](void* pointer) noexcept { delete[] static_cast<std::uint64_t*>(pointer); });
    }
    std::uint64_t* operator[](std::size_t column) { return data_ + column * rows_; }
    NumberArray array(std::size_t column, std::size_t used) { return {data_ + column * rows_, {used}, owner_}; }

private:
    std::size_t rows_;
    std::uint64_t* data_;
    nb::object owner_;
};

template <auto kMove>
std::tuple<std::uint64_t, int, int> stream(int socket, const Numbers& addresses, const Numbers& lengths,
                                           std::uint64_t skip, double idle_s, double deadline_s) {
    expect_size(addresses, "addresses", lengths.size());
    const nb::gil_scoped_release release;
    const Streamed streamed =
        kMove(socket, as_column(addresses), as_column(lengths), skip, Patience{idle_s, deadline_s});
    return {streamed.bytes, static_cast<int>(streamed.end), streamed.error};
}

using SumArray = nb::ndarray<nb::numpy, std::uint32_t, nb::ndim<1>, nb::c_contig>;

SumArray as_array(std::unique_ptr<std::uint32_t[]> sums, std::size_t size) {
    std::uint32_t* data = sums.release();
    const nb::capsule owner(data, [](void* pointer) noexcept { delete[] static_cast<std::uint32_t*>(pointer); });
    return {data, {size}, owner};
}

template <Crc32c* kSum>
SumArray checksum(const Numbers& addresses, const Numbers& lengths) {
    expect_size(addresses, "addresses", lengths.size());
    auto sums = std::make_unique_for_overwrite<std::uint32_t[]>(lengths.size());
    without_gil(is_long(lengths), [&] {
        for (std::size_t i = 0; i < lengths.size(); ++i) {
            sums[i] = kSum(0, {reinterpret_cast<const std::byte*>(addresses.data()[i]), lengths.data()[i]});
        }
    });
    return as_array(std::move(sums), lengths.size());
}

std::optional<SumArray> copy_with_sums(const Numbers& targets, const Numbers& sources, const Numbers& lengths,
                                       std::size_t threads, const std::optional<Flag>& stop) {
    expect_size(targets, "targets", lengths.size());
    expect_size(sources, "sources", lengths.size());
    auto sums = std::make_unique_for_overwrite<std::uint32_t[]>(lengths.size());
    const bool is_done = without_gil(is_long(lengths), [&, flag = as_stop(stop)] {
        return copy_summed(as_column(targets), as_column(sources), as_column(lengths), sums.get(), threads, flag);
    });
    return is_done ? std::optional(as_array(std::move(sums), lengths.size())) : std::nullopt;
}

nb::tuple coalesce_all(const Numbers& local, const Numbers& remote, const Numbers& lengths) {
    expect_size(local, "local", lengths.size());
    expect_size(remote, "remote", lengths.size());
    Owned<3> out(lengths.size());
    const std::size_t used = coalesce({as_column(local), as_column(remote), as_column(lengths), {}, {}},
                                      {out[0], out[1], out[2], nullptr, nullptr});
    return nb::make_tuple(out.array(0, used), out.array(1, used), out.array(2, used));
}

nb::tuple coalesce_by_region(const Numbers& local, const Numbers& remote, const Numbers& lengths,
                             const Numbers& local_regions, const Numbers& remote_regions) {
    expect_size(local, "local", lengths.size());
    expect_size(remote, "remote", lengths.size());
    expect_size(local_regions, "local_regions", lengths.size());
    expect_size(remote_regions, "remote_regions", lengths.size());
    Owned<5> out(lengths.size());
    const std::size_t used = coalesce({as_column(local), as_column(remote), as_column(lengths),
                                       as_column(local_regions), as_column(remote_regions)},
                                      {out[0], out[1], out[2], out[3], out[4]});
    return nb::make_tuple(out.array(0, used), out.array(1, used), out.array(2, used), out.array(3, used),
                          out.array(4, used));
}

}  // namespace

void bind_ranges(nb::module_& module) {
    module.def("copy_ranges", &copy, nb::arg("targets").noconvert(), nb::arg("sources").noconvert(),
               nb::arg("lengths").noconvert(), "threads"_a, "stop"_a.none() = nb::none());
    module.def("read_process", &move_process<Direction::kRead>, "pid"_a, nb::arg("local").noconvert(),
               nb::arg("remote").noconvert(), nb::arg("lengths").noconvert(), "threads"_a, "stop"_a.none() = nb::none());
    module.def("write_process", &move_process<Direction::kWrite>, "pid"_a, nb::arg("local").noconvert(),
               nb::arg("remote").noconvert(), nb::arg("lengths").noconvert(), "threads"_a, "stop"_a.none() = nb::none());
    module.def("send_ranges", &stream<send_ranges>, "socket"_a, nb::arg("addresses").noconvert(),
               nb::arg("lengths").noconvert(), "skip"_a, "idle_s"_a, "deadline_s"_a);
    module.def("receive_ranges", &stream<receive_ranges>, "socket"_a, nb::arg("addresses").noconvert(),
               nb::arg("lengths").noconvert(), "skip"_a, "idle_s"_a, "deadline_s"_a);
    module.def("copy_summed", &copy_with_sums, nb::arg("targets").noconvert(), nb::arg("sources").noconvert(),
               nb::arg("lengths").noconvert(), "threads"_a, "stop"_a.none() = nb::none());
    module.def("checksum_ranges", &checksum<crc32c>, nb::arg("addresses").noconvert(),
               nb::arg("lengths").noconvert());
    module.def("checksum_ranges_portable", &checksum<crc32c_portable>, nb::arg("addresses").noconvert(),
               nb::arg("lengths").noconvert());
    module.def("check_bounds", &check_bounds, nb::arg("offsets").noconvert(), nb::arg("lengths").noconvert(),
               "size"_a);
    module.def("coalesce", &coalesce_all, nb::arg("local").noconvert(), nb::arg("remote").noconvert(),
               nb::arg("lengths").noconvert());
    module.def("coalesce", &coalesce_by_region, nb::arg("local").noconvert(), nb::arg("remote").noconvert(),
               nb::arg("lengths").noconvert(), nb::arg("local_regions").noconvert(),
               nb::arg("remote_regions").noconvert());
}

}  // namespace penstock
