// The `kv` policy's sums: what a request costs everybody on each worker, in seconds.
//
// The oracle is the Python reference in src/penstock/router/predicted_seconds.py, which says why: equal input gives equal
// output, to the last bit, so that additions and products are in the same order.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "holders.hpp"

namespace penstock {

enum class Term : std::size_t {
    kQueue, kKvWait, kOnboard, kPrefill, kItl, kSlowdown, kQueueExternality, kKvPressure, kNetwork, kSloViolation,
};
constexpr std::size_t kTerms = 10;

// What is asked, and the policy's weights.
struct Asked {
    std::int64_t request_tokens;
    std::int64_t request_blocks;
    std::int64_t block_size;  // > 0
    double output_tokens;      // of a mean answer, >= 1
    double own_output_tokens;  // expected of this request's answer, >= 1
    double request_rate_per_s;
    double itl_weight;
    double ttft_target_s;  // infinite: none
    double itl_target_s;   // infinite: none
    double busy_period;
    double delayed_max;
    double token_s_min;  // > 0
    double request_bytes;
};

// Columns by worker slot, all as long as the first; tiers one after the other.
struct Columns {
    std::span<const bool> eligible;
    const std::int32_t* overlap_blocks;
    const std::int32_t* tier_blocks;
    const std::int64_t* active_blocks;
    const std::int64_t* total_blocks;
    const std::int64_t* running_requests;
    const std::int64_t* waiting_requests;
    const std::int64_t* queued_prefill_tokens;
    const std::int64_t* context_tokens;
    const std::int64_t* own_requests;
    const std::int64_t* own_prefill_tokens;
    const std::int64_t* own_prefill_pairs;
    const std::int64_t* peer_requests;
    const std::int64_t* peer_prefill_tokens;
    const std::int64_t* peer_prefill_pairs;
    const double* prefill_step_s;
    const double* prefill_token_s;
    const double* prefill_pair_s;
    const double* decode_step_s;
    const double* decode_sequence_s;
    const double* decode_token_s;
    const double* batch_tokens;
    const double* prompts_at_once;
    const double* onboard_token_s;
    const double* round_trip_s;
    const double* byte_s;
};

// One of several loops over the slots, which give equal numbers.
struct PriceKernel {
    const char* name;
    void (*price_each)(const Asked& asked, const Columns& columns, std::size_t slots, double* terms, double* use);
};

// Those that this machine runs, the fastest first and the portable one last.
std::span<const PriceKernel> price_kernels();

// Write (kTerms, slots) seconds, in the order of `Term`.
void predicted_seconds(const Asked& asked, const Columns& columns, double* terms,
                       const PriceKernel& kernel = price_kernels().front());

}  // namespace penstock
