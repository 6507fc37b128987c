// The functions penstock._native.predicted_seconds and cheapest.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>

#include "cheapest.hpp"
#include "predicted_seconds.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace penstock {
namespace {

using Terms = nb::ndarray<nb::numpy, double, nb::shape<kTerms, -1>, nb::c_contig>;

// An array's elements, in place by way of Python's buffers: 0.2 us, where nanobind's ndarray takes 0.7. That is left
// for arrays of other elements, which it converts.
template <class Element>
class Column {
  public:
    explicit Column(nb::handle array) {
        Py_buffer& buffer = held_.buffer;
        if (PyObject_GetBuffer(array.ptr(), &buffer, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) == 0 && has_elements(buffer)) {
            span_ = {static_cast<const Element*>(buffer.buf), static_cast<std::size_t>(buffer.len) / sizeof(Element)};
        } else {
            PyErr_Clear();
            converted_ = nb::cast<Converted>(array);
            span_ = {converted_->data(), converted_->size()};
        }
    }

    // Throws ValueError where it has another size.
    Column(nb::handle array, std::size_t size, const char* name) : Column(array) {
        if (span_.size() != size) {
            const std::string text = std::string(name) + ": must have an entry for each slot";
            throw nb::value_error(text.c_str());
        }
    }

    const Element* data() const { return span_.data(); }
    std::span<const Element> span() const { return span_; }

  private:
    using Converted = nb::ndarray<const Element, nb::c_contig, nb::device::cpu>;

    struct Held {
        Py_buffer buffer{};

        Held() = default;
        Held(const Held&) = delete;
        Held& operator=(const Held&) = delete;
        ~Held() { PyBuffer_Release(&buffer); }
    };

    static bool has_elements(const Py_buffer& buffer) {
        const std::string_view format = buffer.format;
        if constexpr (std::is_same_v<Element, double>) {
            return format == "d";
        } else if constexpr (std::is_same_v<Element, bool>) {
            return format == "?";
        } else {
            return (format == "i" || format == "l" || format == "q") && buffer.itemsize == sizeof(Element);
        }
    }

    Held held_;
    std::optional<Converted> converted_;
    std::span<const Element> span_;
};

// An attribute that has `rows` entries for each slot.
template <class Element>
Column<Element> column(nb::handle source, const char* name, std::size_t slots, std::size_t rows = 1) {
    return Column<Element>(source.attr(name), rows * slots, name);
}

Terms price(nb::handle context, double itl_weight, double ttft_target_s, double itl_target_s, double busy_period,
            double delayed_max, double token_s_min, double request_bytes, std::size_t kernel) {
    if (kernel >= price_kernels().size()) {
        throw nb::value_error("kernel: must be an index of price_kernels()");
    }
    const auto number = [&](const char* name) { return nb::cast<std::int64_t>(context.attr(name)); };
    const Asked asked{
        .request_tokens = number("request_tokens"),
        .request_blocks = number("request_blocks"),
        .block_size = number("block_size"),
        .output_tokens = std::max(nb::cast<double>(context.attr("mean_output_tokens")), 1.0),
        .own_output_tokens = std::max(nb::cast<double>(context.attr("own_output_tokens")), 1.0),
        .request_rate_per_s = nb::cast<double>(context.attr("request_rate_per_s")),
        .itl_weight = itl_weight,
        .ttft_target_s = ttft_target_s,
        .itl_target_s = itl_target_s,
        .busy_period = busy_period,
        .delayed_max = delayed_max,
        .token_s_min = token_s_min,
        .request_bytes = request_bytes,
    };
    const Column<bool> eligible(context.attr("eligible"));
    const std::size_t slots = eligible.span().size();
    const auto count = [&](const char* name) { return column<std::int64_t>(context, name, slots); };
    const auto overlap = column<std::int32_t>(context, "overlap_blocks", slots);
    const auto tiers = column<std::int32_t>(context, "tier_blocks", slots, kTiers);
    const auto active = count("active_blocks");
    const auto total = count("total_blocks");
    const auto running = count("running_requests");
    const auto waiting = count("waiting_requests");
    const auto queued = count("queued_prefill_tokens");
    const auto decoded = count("context_tokens");
    const auto own = count("own_requests");
    const auto own_prefill = count("own_prefill_tokens");
    const auto own_pairs = count("own_prefill_pairs");
    const auto peer = count("peer_requests");
    const auto peer_prefill = count("peer_prefill_tokens");
    const auto peer_pairs = count("peer_prefill_pairs");
    const nb::object prices = context.attr("prices");
    const auto seconds = [&](const char* name) { return column<double>(prices, name, slots); };
    const auto prefill_step_s = seconds("prefill_step_s");
    const auto prefill_token_s = seconds("prefill_token_s");
    const auto prefill_pair_s = seconds("prefill_pair_s");
    const auto decode_step_s = seconds("decode_step_s");
    const auto decode_sequence_s = seconds("decode_sequence_s");
    const auto decode_token_s = seconds("decode_token_s");
    const auto batch_tokens = seconds("batch_tokens");
    const auto prompts_at_once = seconds("prompts_at_once");
    const auto onboard_token_s = column<double>(prices, "onboard_token_s", slots, kTiers);
    const auto round_trip_s = seconds("round_trip_s");
    const auto byte_s = seconds("byte_s");
    const Columns columns{
        .eligible = eligible.span(),
        .overlap_blocks = overlap.data(),
        .tier_blocks = tiers.data(),
        .active_blocks = active.data(),
        .total_blocks = total.data(),
        .running_requests = running.data(),
        .waiting_requests = waiting.data(),
        .queued_prefill_tokens = queued.data(),
        .context_tokens = decoded.data(),
        .own_requests = own.data(),
        .own_prefill_tokens = own_prefill.data(),
        .own_prefill_pairs = own_pairs.data(),
        .peer_requests = peer.data(),
        .peer_prefill_tokens = peer_prefill.data(),
        .peer_prefill_pairs = peer_pairs.data(),
        .prefill_step_s = prefill_step_s.data(),
        .prefill_token_s = prefill_token_s.data(),
        .prefill_pair_s = prefill_pair_s.data(),
        .decode_step_s = decode_step_s.data(),
        .decode_sequence_s = decode_sequence_s.data(),
        .decode_token_s = decode_token_s.data(),
        .batch_tokens = batch_tokens.data(),
        .prompts_at_once = prompts_at_once.data(),
        .onboard_token_s = onboard_token_s.data(),
        .round_trip_s = round_trip_s.data(),
        .byte_s = byte_s.data(),
    };
    auto terms = std::make_unique_for_overwrite<double[]>(kTerms * slots);
    predicted_seconds(asked, columns, terms.get(), price_kernels()[kernel]);
    double* data = terms.release();
    const nb::capsule owner(data, [](void* pointer) noexcept { delete[] static_cast<double*>(pointer); });
    return Terms(data, {kTerms, slots}, owner);
}

std::size_t choose(nb::handle terms, nb::handle eligible, std::uint64_t request_hash) {
    const Column<double> rows(terms);
    const Column<bool> slots(eligible);
    if (slots.span().empty() || rows.span().size() % slots.span().size() != 0) {
        throw nb::value_error("terms: must have rows of an entry for each slot");
    }
    return cheapest(rows.span(), slots.span(), request_hash);
}

}  // namespace

void bind_seconds(nb::module_& module) {
    module.def("predicted_seconds", &price, "context"_a, "itl_weight"_a, "ttft_target_s"_a, "itl_target_s"_a,
               "busy_period"_a, "delayed_max"_a, "token_s_min"_a, "request_bytes"_a, "kernel"_a = 0);
    module.def("price_kernels", [] {
        nb::list names;
        for (const auto& kernel : price_kernels()) {
            names.append(kernel.name);
        }
        return names;
    });
    module.def("cheapest", &choose, "terms"_a, "eligible"_a, "request_hash"_a);
}

}  // namespace penstock
