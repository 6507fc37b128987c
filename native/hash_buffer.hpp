// What calls of Python say of blocks, for native code, and the other way.

#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "holders.hpp"
#include "radix.hpp"

namespace penstock {

namespace nb = nanobind;

inline constexpr std::array<std::string_view, kTiers> kTierNames = {"device", "host", "disk", "object"};

inline std::size_t parse_tier(nb::handle tier) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_Check(tier.ptr()) ? PyUnicode_AsUTF8AndSize(tier.ptr(), &size) : nullptr;
    const std::string_view name(text == nullptr ? "" : text, static_cast<std::size_t>(size));
    const auto at = std::ranges::find(kTierNames, name);
    if (at == kTierNames.end()) {
        PyErr_Clear();
        throw nb::value_error("tier: must be one of device, host, disk, object");
    }
    return static_cast<std::size_t>(at - kTierNames.begin());
}

// Hashes that Python code passes: packed bytes, or a uint64 array of one dimension, whatever its stride.
class HashBuffer {
  public:
    explicit HashBuffer(nb::handle source) {
        if (PyBytes_Check(source.ptr())) {
            set_packed(PyBytes_AsString(source.ptr()), PyBytes_Size(source.ptr()));
            return;
        }
        if (PyObject_GetBuffer(source.ptr(), &buffer_, PyBUF_RECORDS_RO) != 0) {
            throw nb::python_error();
        }
        try {
            parse();
        } catch (...) {
            PyBuffer_Release(&buffer_);
            throw;
        }
    }
    HashBuffer(HashBuffer&& other) noexcept : buffer_(other.buffer_), view_(other.view_) {
        other.buffer_.obj = nullptr;
    }
    HashBuffer& operator=(HashBuffer&&) = delete;

    ~HashBuffer() {
        if (buffer_.obj != nullptr) {
            PyBuffer_Release(&buffer_);
        }
    }

    HashView view() const { return view_; }

  private:
    void parse() {
        const char* format = buffer_.format == nullptr ? "B" : buffer_.format;
        const bool has_order = *format == '@' || *format == '=' || *format == '<';
        const char kind = format[has_order ? 1 : 0];
        if (buffer_.ndim != 1) {
            throw nb::type_error("hashes: must have one dimension");
        }
        if (buffer_.itemsize == 1 && buffer_.strides[0] == 1) {
            set_packed(buffer_.buf, buffer_.len);
        } else if (buffer_.itemsize == sizeof(std::uint64_t) && (kind == 'L' || kind == 'Q')) {
            view_ = HashView(buffer_.buf, buffer_.strides[0], static_cast<std::size_t>(buffer_.shape[0]));
        } else {
            throw nb::type_error("hashes: must be uint64, or those packed as bytes");
        }
    }

    void set_packed(const void* data, Py_ssize_t num_bytes) {
        constexpr Py_ssize_t kHashBytes = sizeof(std::uint64_t);
        if (num_bytes % kHashBytes != 0) {
            throw nb::value_error("hashes: packed, they must be a multiple of 8 bytes");
        }
        view_ = HashView(data, kHashBytes, static_cast<std::size_t>(num_bytes / kHashBytes));
    }

    Py_buffer buffer_{};
    HashView view_{nullptr, 0, 0};
};

// Give runs as Python has them: packed hashes, the parent, copies by tier.
inline nb::list as_list(std::span<const std::uint64_t> hashes, std::span<const Run> runs) {
    nb::list found;
    std::size_t begin = 0;
    for (const Run& run : runs) {
        const nb::bytes packed(hashes.data() + begin, (run.end - begin) * sizeof(std::uint64_t));
        nb::list copies;
        for (const std::uint32_t count : run.copies) {
            copies.append(count);
        }
        found.append(nb::make_tuple(packed, run.parent, nb::tuple(copies)));
        begin = run.end;
    }
    return found;
}

}  // namespace penstock
