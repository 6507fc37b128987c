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

}  // namespace

void predicted_seconds(const Asked& asked, const Columns& columns, double* terms) {
    const std::size_t slots = columns.eligible.size();
    const auto size = static_cast<double>(asked.block_size);
    const double output = asked.output_tokens;
    const double own_output = asked.own_output_tokens;
    const auto speed_of = [&](std::size_t i) {
        return (columns.eligible[i] ? columns.prompts_at_once[i] : 0.0) / std::max(columns.prefill_token_s[i], asked.token_s_min);
    };
    double speeds = 0.0;
    for (std::size_t i = 0; i < slots; ++i) {
        speeds += speed_of(i);
    }
    const double speeds_min_1 = std::max(speeds, 1.0);
    const auto row = [&](Term term) { return terms + static_cast<std::size_t>(term) * slots; };
    std::vector<double> use(slots);  // of memory
    std::vector<double> waits;       // of those eligible: for queue and KV memory, for KV memory alone; and its use there
    std::vector<double> kv_waits;
    std::vector<double> uses;
    for (auto* values : {&waits, &kv_waits, &uses}) {
        values->reserve(slots);
    }

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
        std::int64_t had = columns.overlap_blocks[i];
        for (std::size_t tier = 0; tier < kTiers; ++tier) {
            const std::size_t at = tier * slots + i;
            if (columns.onboard_token_s[at] <= columns.prefill_token_s[i]) {
                fetched += columns.tier_blocks[at] * columns.onboard_token_s[at];
            } else {
                had -= columns.tier_blocks[at];
            }
        }
        const auto cached = static_cast<double>(std::min(had * asked.block_size, asked.request_tokens - 1));
        const double uncached = static_cast<double>(asked.request_tokens) - cached;
        const double attended = uncached * (cached + (uncached + 1) / 2);
        const double prefill =
            columns.prefill_step_s[i] + uncached * token_s + attended * columns.prefill_pair_s[i];

        const double growing = static_cast<double>(present) * (output / 2 / size);
        double wanted = static_cast<double>(columns.active_blocks[i]) + queued / size + growing;
        const auto new_blocks = static_cast<double>(asked.request_blocks - columns.tier_blocks[i]);
        wanted += new_blocks;
        const auto total = static_cast<double>(columns.total_blocks[i]);
        const double of_all = (total > 0 ? 1.0 : 0.0) / std::max(total, 1.0);
        const double answer_s = output * step_s;
        const double kv_wait = std::max(wanted - total, 0.0) * of_all * answer_s;

        const double more_s = columns.decode_sequence_s[i] +
                              (static_cast<double>(asked.request_tokens) + own_output / 2) * columns.decode_token_s[i];
        const double slowdown = asked.itl_weight * running * (prefill / output + more_s * (own_output / output));

        const double network = columns.round_trip_s[i] + asked.request_bytes * columns.byte_s[i];

        const double onboard = size * fetched;
        const double late_s = past_target(queue + kv_wait + onboard + prefill + network, asked.ttft_target_s);
        const double violation = late_s + asked.itl_weight * past_target(step_s + more_s, asked.itl_target_s);

        row(Term::kQueue)[i] = queue;
        row(Term::kKvWait)[i] = kv_wait;
        row(Term::kOnboard)[i] = onboard;
        row(Term::kPrefill)[i] = prefill;
        row(Term::kItl)[i] = asked.itl_weight * step_s;
        row(Term::kSlowdown)[i] = slowdown;
        row(Term::kKvPressure)[i] = new_blocks * of_all * (own_output * step_s);
        row(Term::kNetwork)[i] = network;
        row(Term::kSloViolation)[i] = violation;
        use[i] = std::min(wanted * of_all, 1.0);
        if (columns.eligible[i]) {
            waits.push_back(queue + kv_wait);
            kv_waits.push_back(kv_wait);
            uses.push_back(use[i]);
        }
    }

    const double wait_s = middle(waits);
    const double kv_wait_s = middle(kv_waits);
    const double use_most = middle(uses);
    for (std::size_t i = 0; i < slots; ++i) {
        const double rate_per_s = asked.request_rate_per_s * speed_of(i) / speeds_min_1;
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
