// The class penstock._native.JumpScheduler.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <limits>
#include <string>
#include <tuple>

#include "jump_scheduler.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace penstock {
namespace {

std::vector<Hash> copy_hashes(nb::handle source) {
    Py_buffer buffer;
    if (PyObject_GetBuffer(source.ptr(), &buffer, PyBUF_C_CONTIGUOUS) != 0) {
        throw nb::python_error();
    }
    std::vector<Hash> hashes(static_cast<std::size_t>(buffer.len) / sizeof(Hash));
    const bool is_whole = hashes.size() * sizeof(Hash) == static_cast<std::size_t>(buffer.len);
    if (is_whole && !hashes.empty()) {
        std::memcpy(hashes.data(), buffer.buf, static_cast<std::size_t>(buffer.len));
    }
    PyBuffer_Release(&buffer);
    if (!is_whole) {
        throw nb::value_error("hashes: must be a multiple of 16 bytes");
    }
    return hashes;
}

// Asks a `penstock.sim.workload.SimStream`.
class StreamNames : public Names {
  public:
    StreamNames(nb::object stream, Count block_size) : stream_(std::move(stream)), block_size_(block_size) {}

    std::vector<Hash> between(Count start, Count end) const override {
        auto hashes = copy_hashes(stream_.attr("block_hashes")(block_size_, start, end));
        if (static_cast<Count>(hashes.size()) != end - start) {
            throw nb::value_error("stream: must name as many blocks as were asked for");
        }
        return hashes;
    }

  private:
    nb::object stream_;
    Count block_size_;
};

// Asks a Python object with the methods of `penstock._native.Tiers`.
class PythonTiers : public JumpTiers {
  public:
    explicit PythonTiers(nb::object tiers) : tiers_(std::move(tiers)) {}

    Count find(std::span<const Hash> hashes, const std::vector<BlockId>& hits, Count known,
               const std::vector<std::pair<Count, Count>>& ahead) override {
        return nb::cast<Count>(tiers_.attr("find")(nb::bytes(hashes.data(), hashes.size_bytes()), hits, known, ahead));
    }

    std::vector<BlockId> load(Count number, std::optional<Count> prompt_tokens) override {
        return nb::cast<std::vector<BlockId>>(tiers_.attr("load")(number, prompt_tokens));
    }

    std::vector<BlockId> prefetch(Count number) override {
        return nb::cast<std::vector<BlockId>>(tiers_.attr("prefetch")(number));
    }

    void use_prefetch(Count number, std::optional<Count> prompt_tokens) override {
        tiers_.attr("use_prefetch")(number, prompt_tokens);
    }

    void end_prefetch(Count number) override { tiers_.attr("end_prefetch")(number); }

    void cancel(Count number) override { tiers_.attr("cancel")(number); }

    void offload(std::span<const Hash> hashes) override {
        tiers_.attr("offload")(nb::bytes(hashes.data(), hashes.size_bytes()));
    }

    std::vector<std::pair<Count, std::vector<BlockId>>> take_arrived() override {
        return nb::cast<std::vector<std::pair<Count, std::vector<BlockId>>>>(tiers_.attr("take_arrived")());
    }

  private:
    nb::object tiers_;
};

// A scheduler and the size of its blocks, which streams are asked with.
class BoundScheduler {
  public:
    BoundScheduler(Pool& pool, Count block_size, Count max_batch_tokens, Count prompt_budget, Count max_running,
                   nb::object tiers, Count prefetched, std::vector<std::pair<Count, Count>> windows, Count whole_layers)
        : block_size_(positive(block_size, "block_size")),
          tiers_(tiers.is_none() ? nullptr : std::make_unique<PythonTiers>(std::move(tiers))),
          scheduler_(pool, block_size,
                     {positive(max_batch_tokens, "max_batch_tokens"), positive(prompt_budget, "prompt_budget"),
                      positive(max_running, "max_running"), prefetched, checked(std::move(windows)),
                      positive(whole_layers, "whole_layers")},
                     tiers_.get()) {}

    Count num_waiting() const { return scheduler_.num_waiting(); }
    bool wants_plan() const { return scheduler_.wants_plan(); }
    Count blocks_reserved() const { return scheduler_.blocks_reserved(); }
    void look_again() { scheduler_.look_again(); }

    void reorder(std::optional<double> ageing) {
        if (ageing && !(*ageing > 0 && *ageing <= 1)) {
            throw nb::value_error("ageing: must be more than 0, and at most 1");
        }
        scheduler_.reorder(ageing);
    }

    void set_now(double now_s) { scheduler_.set_now(now_s); }

    void submit(Count number, std::pair<Count, Count> tokens, Count end_tokens, nb::handle hashes, nb::object stream,
                bool kv_transfer, std::tuple<int, int, double, std::uint64_t> use) {
        const auto [num_prompt, known] = tokens;
        if (num_prompt < 1 || known < num_prompt) {
            throw nb::value_error("tokens: there must be some in the prompt, and none of it unknown");
        }
        const auto [kind, priority, ttl_s, tenant] = use;
        if (kind < 0 || kind >= static_cast<int>(ReuseTable::kKinds) || priority < -8 || priority > 7 || !(ttl_s >= 0)) {
            throw nb::value_error("use: needs a kind from 0 to 2, a priority from -8 to 7 and seconds");
        }
        scheduler_.submit({number, known, num_prompt, end_tokens, kv_transfer, copy_hashes(hashes),
                           std::make_unique<StreamNames>(std::move(stream), block_size_),
                           BlockUse{.kind = static_cast<std::uint8_t>(kind), .priority = static_cast<std::int8_t>(priority), .tenant = tenant},
                           ttl_s});
    }

    void abort(Count number) { scheduler_.abort(number); }

    nb::object plan() {
        const auto jump = scheduler_.plan();
        if (!jump) {
            return nb::none();
        }
        nb::object chunks = nb::none();
        if (jump->has_prompts) {
            chunks = nb::cast(jump->chunks);
        }
        return nb::make_tuple(jump->steps, jump->batch, jump->context, chunks);
    }

    nb::tuple commit(Count steps) {
        const Committed committed = scheduler_.commit(steps);
        return nb::make_tuple(as_list(committed.told), committed.prefilling, committed.has_news);
    }

    void settle(Count steps) { scheduler_.settle(steps); }
    nb::list so_far() { return as_list(scheduler_.so_far()); }

    nb::tuple load(Count steps) const {
        const JumpLoad load = scheduler_.load(steps);
        return nb::make_tuple(load.running, load.waiting, load.active_blocks, load.queued_prefill_tokens,
                              load.context_tokens, load.steps, load.preemptions, load.prefilled_tokens,
                              load.prefix_hit_tokens, load.generated_tokens);
    }

    nb::dict held() const {
        nb::dict counts;
        for (const auto& [id, count] : scheduler_.held()) {
            counts[nb::int_(id)] = count;
        }
        return counts;
    }

    void check() const { scheduler_.check(); }

  private:
    static Count positive(Count value, const char* name) {
        if (value < 1) {
            throw nb::value_error((std::string(name) + ": must be >= 1").c_str());
        }
        return value;
    }

    static std::vector<std::pair<Count, Count>> checked(std::vector<std::pair<Count, Count>> windows) {
        for (const auto& [tokens, layers] : windows) {
            positive(tokens, "windows: tokens");
            positive(layers, "windows: layers");
        }
        return windows;
    }

    static nb::list as_list(const std::vector<Told>& told) {
        nb::list list;
        for (const Told& one : told) {
            list.append(nb::make_tuple(one.number, one.begin, one.end, one.is_end, one.cached_tokens));
        }
        return list;
    }

    Count block_size_;
    std::unique_ptr<PythonTiers> tiers_;
    JumpScheduler scheduler_;
};

}  // namespace

void bind_jump_scheduler(nb::module_& module);

void bind_jump_scheduler(nb::module_& module) {
    nb::class_<BoundScheduler>(module, "JumpScheduler")
        .def(nb::init<Pool&, Count, Count, Count, Count, nb::object, Count,
                      std::vector<std::pair<Count, Count>>, Count>(), "pool"_a, "block_size"_a, "max_batch_tokens"_a,
             "prompt_budget"_a, "max_running"_a, "tiers"_a = nb::none(), "prefetched"_a = 0,
             "windows"_a = std::vector<std::pair<Count, Count>>{}, "whole_layers"_a = 1, nb::keep_alive<1, 2>())
        .def_prop_ro("num_waiting", &BoundScheduler::num_waiting)
        .def_prop_ro("wants_plan", &BoundScheduler::wants_plan)
        .def_prop_ro("blocks_reserved", &BoundScheduler::blocks_reserved)
        .def("look_again", &BoundScheduler::look_again)
        .def("reorder", &BoundScheduler::reorder, "ageing"_a.none())
        .def("submit", &BoundScheduler::submit, "number"_a, "tokens"_a, "end_tokens"_a, "hashes"_a, "stream"_a,
             "kv_transfer"_a = false, "use"_a = std::tuple(0, 0, std::numeric_limits<double>::infinity(), std::uint64_t{0}))
        .def("set_now", &BoundScheduler::set_now, "now_s"_a)
        .def("abort", &BoundScheduler::abort, "number"_a)
        .def("plan", &BoundScheduler::plan)
        .def("commit", &BoundScheduler::commit, "steps"_a)
        .def("settle", &BoundScheduler::settle, "steps"_a)
        .def("so_far", &BoundScheduler::so_far)
        .def("load", &BoundScheduler::load, "steps"_a = 0)
        .def("held", &BoundScheduler::held)
        .def("check", &BoundScheduler::check);
}

}  // namespace penstock
