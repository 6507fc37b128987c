#include "predicted_seconds.hpp"

#include <algorithm>
#include <vector>

namespace penstock {
namespace {

// The lower median; 0 of none. Orders what it is given anew.
double middle(std::vector<double>& values) {
    if (values.empty()) {
        return 0.0;
    }
    const auto at = values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) / 2);
    std::nth_element(values.begin(), at, values.end());
    return *at;
}

double past_target(double predicted_s, double target_s) { return std::min(std::max(predicted_s - target_s, 0.0), target_s); }

// The terms that a worker has by itself, and the share of its memory in use. Without branches, so that several workers are priced
// at once where the machine can: the same operations in the same order for each.
[[gnu::always_inline]] inline void price_any(const Asked& asked, const Columns& given, std::size_t slots, double* terms, double* use) {
    const Columns columns = given;  // pointers that nothing written here can change
    const auto size = static_cast<double>(asked.block_size);
    const double output = asked.output_tokens;
    const double own_output = asked.own_output_tokens;
    const Asked of = asked;
    double* const queue_of = terms + static_cast<std::size_t>(Term::kQueue) * slots;
    double* const kv_wait_of = terms + static_cast<std::size_t>(Term::kKvWait) * slots;
    double* const onboard_of = terms + static_cast<std::size_t>(Term::kOnboard) * slots;
    double* const prefill_of = terms + static_cast<std::size_t>(Term::kPrefill) * slots;
    double* const itl_of = terms + static_cast<std::size_t>(Term::kItl) * slots;
    double* const slowdown_of = terms + static_cast<std::size_t>(Term::kSlowdown) * slots;
    double* const kv_pressure_of = terms + static_cast<std::size_t>(Term::kKvPressure) * slots;
    double* const network_of = terms + static_cast<std::size_t>(Term::kNetwork) * slots;
    double* const slo_violation_of = terms + static_cast<std::size_t>(Term::kSloViolation) * slots;
#pragma GCC ivdep
    for (std::size_t i = 0; i < slots; ++i) {
        const auto running = static_cast<double>(columns.running_requests[i]);
        double step_s = columns.decode_step_s[i] + running * columns.decode_sequence_s[i];
        step_s += static_cast<double>(columns.context_tokens[i]) * columns.decode_token_s[i];
        const double ranks = columns.prompts_at_once[i];
        const double token_s = columns.prefill_token_s[i] + step_s * (ranks / columns.batch_tokens[i]);

        const std::int64_t reported = columns.queued_prefill_tokens[i];
        const std::int64_t known = columns.own_prefill_tokens[i] + columns.peer_prefill_tokens[i];
        const std::int64_t left = std::min(known, reported);
        const std::int64_t present = columns.running_requests[i] + columns.waiting_requests[i];
        const double requests = static_cast<double>(std::max<std::int64_t>(present, 1));
        const auto routed = static_cast<double>(columns.own_requests[i] + columns.peer_requests[i]);
        const double others = 1.0 - std::min(routed / requests, 1.0);
        const double queued = static_cast<double>(left) + static_cast<double>(reported - left) * others;
        const double part = static_cast<double>(left) / static_cast<double>(std::max<std::int64_t>(known, 1));
        const std::int64_t known_pairs = columns.own_prefill_pairs[i] + columns.peer_prefill_pairs[i];
        const double pairs = static_cast<double>(known_pairs) * part;
        const double queue = (queued * token_s + pairs * columns.prefill_pair_s[i]) / ranks;

        double fetched = 0.0;
        double had = columns.overlap_blocks[i];  // whole numbers, exact
        for (std::size_t tier = 0; tier < kTiers; ++tier) {
            const std::size_t at = tier * slots + i;
            const double blocks = columns.tier_blocks[at];
            const double token_s_there = columns.onboard_token_s[at];
            const bool is_quick = token_s_there <= columns.prefill_token_s[i];
            const double loaded = blocks * token_s_there;
            fetched += is_quick ? loaded : 0.0;
            had -= is_quick ? 0.0 : blocks;
        }
        const auto cached = std::min(had * size, static_cast<double>(of.request_tokens - 1));
        const double uncached = static_cast<double>(of.request_tokens) - cached;
        const double attended = uncached * (cached + (uncached + 1) / 2);
        const double prefill =
            columns.prefill_step_s[i] + uncached * token_s + attended * columns.prefill_pair_s[i];

        const double growing = static_cast<double>(present) * (output / 2 / size);
        double wanted = static_cast<double>(columns.active_blocks[i]) + queued / size + growing;
        const auto new_blocks = static_cast<double>(of.request_blocks - columns.tier_blocks[i]);
        wanted += new_blocks;
        const auto total = static_cast<double>(columns.total_blocks[i]);
        const double of_all = (total > 0 ? 1.0 : 0.0) / std::max(total, 1.0);
        const double answer_s = output * step_s;
        const double kv_wait = std::max(wanted - total, 0.0) * of_all * answer_s;

        const double more_s = columns.decode_sequence_s[i] +
                              (static_cast<double>(of.request_tokens) + own_output / 2) * columns.decode_token_s[i];
        const double slowdown = of.itl_weight * running * (prefill / output + more_s * (own_output / output));

        const double network = columns.round_trip_s[i] + of.request_bytes * columns.byte_s[i];

        const double onboard = size * fetched;
        const double late_s = past_target(queue + kv_wait + onboard + prefill + network, of.ttft_target_s);
        const double violation = late_s + of.itl_weight * past_target(step_s + more_s, of.itl_target_s);

        queue_of[i] = queue;
        kv_wait_of[i] = kv_wait;
        onboard_of[i] = onboard;
        prefill_of[i] = prefill;
        itl_of[i] = of.itl_weight * step_s;
        slowdown_of[i] = slowdown;
        kv_pressure_of[i] = new_blocks * of_all * (own_output * step_s);
        network_of[i] = network;
        slo_violation_of[i] = violation;
        use[i] = std::min(wanted * of_all, 1.0);
    }
}

void price_portably(const Asked& asked, const Columns& columns, std::size_t slots, double* terms, double* use) {
    price_any(asked, columns, slots, terms, use);
}

#if defined(__x86_64__)
[[gnu::target("avx512f,avx512dq,avx512vl,avx512bw")]] void price_by_eight(const Asked& asked, const Columns& columns,
                                                                          std::size_t slots, double* terms, double* use) {
    price_any(asked, columns, slots, terms, use);
}
#endif

}  // namespace

std::span<const PriceKernel> price_kernels() {
    static const std::vector<PriceKernel> runnable = [] {
        std::vector<PriceKernel> found;
#if defined(__x86_64__)
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
            __builtin_cpu_supports("avx512bw")) {
            found.push_back({"avx512", price_by_eight});
        }
#endif
        found.push_back({"portable", price_portably});
        return found;
    }();
    return runnable;
}

void predicted_seconds(const Asked& asked, const Columns& columns, double* terms, const PriceKernel& kernel) {
    const std::size_t slots = columns.eligible.size();
    const auto speed_of = [&](std::size_t i) {
        return (columns.eligible[i] ? columns.prompts_at_once[i] : 0.0) / std::max(columns.prefill_token_s[i], asked.token_s_min);
    };
    std::vector<double> speed(slots);
    double speeds = 0.0;
    for (std::size_t i = 0; i < slots; ++i) {
        speed[i] = speed_of(i);
        speeds += speed[i];
    }
    const double speeds_min_1 = std::max(speeds, 1.0);
    const auto row = [&](Term term) { return terms + static_cast<std::size_t>(term) * slots; };
    std::vector<double> use(slots);  // of memory
    kernel.price_each(asked, columns, slots, terms, use.data());

    std::vector<double> waits(slots);  // of those eligible: for queue and KV memory, for KV memory alone; and its use there
    std::vector<double> kv_waits(slots);
    std::vector<double> uses(slots);
    std::size_t count = 0;
    for (std::size_t i = 0; i < slots; ++i) {
        waits[count] = row(Term::kQueue)[i] + row(Term::kKvWait)[i];
        kv_waits[count] = row(Term::kKvWait)[i];
        uses[count] = use[i];
        count += columns.eligible[i] ? 1 : 0;
    }
    for (auto* values : {&waits, &kv_waits, &uses}) {
        values->resize(count);
    }
    const double wait_s = middle(waits);
    const double kv_wait_s = middle(kv_waits);
    const double use_most = middle(uses);
    for (std::size_t i = 0; i < slots; ++i) {
        const double rate_per_s = asked.request_rate_per_s * speed[i] / speeds_min_1;
        const double shared = row(Term::kPrefill)[i] / columns.prompts_at_once[i];
        const double delayed = rate_per_s * asked.busy_period * (wait_s + shared);
        row(Term::kQueueExternality)[i] = shared * std::min(delayed, asked.delayed_max);

        double crowded = std::min(use[i], use_most);
        crowded *= crowded;
        crowded *= crowded;
        crowded *= crowded;
        const double wanting_s = std::min(row(Term::kKvWait)[i], kv_wait_s);
        const double wanting = std::min(rate_per_s * asked.busy_period * wanting_s, asked.delayed_max);
        row(Term::kKvPressure)[i] *= asked.busy_period * crowded + wanting;
    }
}

}  // namespace penstock
