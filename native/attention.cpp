// For each row: the scores of all tokens, their softmax, the weighted sum of values. Memory is what the time goes into,
// so keys and values are read once, in the order in which they lie, all heads of a block together; and as each block
// lies somewhere else, the next one is asked for while this one is read.

#include "attention.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#define ALWAYS_INLINE inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))

namespace penstock {
namespace {

constexpr std::size_t kLanes = kHeadDimStep;
using Floats __attribute__((vector_size(kLanes * 4))) = float;
using Words __attribute__((vector_size(kLanes * 4))) = std::uint32_t;
using Halves __attribute__((vector_size(kLanes * 2))) = std::uint16_t;

ALWAYS_INLINE void load(const float* from, Floats& to) { std::memcpy(&to, from, sizeof to); }

ALWAYS_INLINE void load(const std::uint16_t* from, Floats& to) {
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    const Words words = __builtin_convertvector(halves, Words) << 16;
    std::memcpy(&to, &words, sizeof to);
}

ALWAYS_INLINE void store(const Floats& from, float* to) { std::memcpy(to, &from, sizeof from); }

// Round to the nearest bfloat16, ties to even.
ALWAYS_INLINE void store(const Floats& from, std::uint16_t* to) {
    Words words;
    std::memcpy(&words, &from, sizeof words);
    words = (words + 0x7fff + ((words >> 16) & 1)) >> 16;
    const Halves halves = __builtin_convertvector(words, Halves);
    std::memcpy(to, &halves, sizeof halves);
}

ALWAYS_INLINE float sum(const Floats& x) {
    using Eight __attribute__((vector_size(32))) = float;
    using Four __attribute__((vector_size(16))) = float;
    const Eight eight = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
                        __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
    const Four four =
        __builtin_shufflevector(eight, eight, 0, 1, 2, 3) + __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
    const Four two = four + __builtin_shufflevector(four, four, 2, 3, 0, 1);
    return two[0] + two[1];
}

// e to the x, within 2 units in the last place from -87 on; what is smaller counts as -87.
// Source: range reduction and polynomial of Cephes' expf, Moshier 1992.
ALWAYS_INLINE void exponentiate(Floats& x) {
    const Floats least = Floats{} - 87.0F;
    x = x < least ? least : x;
    const Floats shifted = x * 1.44269504F + 12582912.0F;  // the nearest whole number is in the low mantissa bits
    Words whole;
    std::memcpy(&whole, &shifted, sizeof whole);
    const Floats count = shifted - 12582912.0F;
    const Floats rest = (x - count * 0.693359375F) + count * 2.12194440e-4F;
    Floats series = rest * 1.9875691500e-4F + 1.3981999507e-3F;
    series = series * rest + 8.3334519073e-3F;
    series = series * rest + 4.1665795894e-2F;
    series = series * rest + 1.6666665459e-1F;
    series = series * rest + 5.0000001201e-1F;
    series = series * rest * rest + rest + 1.0F;
    const Words exponent = (whole - 0x4b400000 + 127) << 23;
    Floats power;
    std::memcpy(&power, &exponent, sizeof power);
    x = series * power;
}

// Squash scores to (-softcap, softcap): softcap * tanh(score / softcap).
ALWAYS_INLINE void cap(Floats& x, float softcap) {
    x *= 2.0F / softcap;
    const Floats most = Floats{} + 80.0F;
    x = x > most ? most : x;
    exponentiate(x);
    x = softcap - 2.0F * softcap / (x + 1.0F);
}

// Neighbouring tokens of a row, all in one block: the first one's index, how many, where they lie, and what is read
// some runs after them, which whoever reads this run asks the memory for, a token at a time.
template <class Element>
struct Run {
    std::size_t token;
    std::size_t count;
    const Element* at;
    const Element* ahead;
};

// The runs of a row's tokens [first, length), tokens indexed from `first`.
template <class Element>
struct Runs {
    const std::int32_t* table;
    std::size_t first;
    std::size_t length;
    std::size_t count;

    ALWAYS_INLINE Runs(const DecodeAttention<Element>& call, std::size_t row)
        : table(call.tables + row * call.table_width), length(static_cast<std::size_t>(call.lengths[row])) {
        first = call.window > 0 && length > call.window ? length - call.window : 0;
        table += first / call.block_size;
        count = (length - 1) / call.block_size - first / call.block_size + 1;
    }

    // Where a run's keys or values lie, those of `layer`; the last one's for all after it.
    ALWAYS_INLINE const Element* at(const DecodeAttention<Element>& call, const Element* layer, std::size_t run) const {
        run = std::min(run, count - 1);
        const std::size_t skipped = run == 0 ? first % call.block_size : 0;
        return layer + static_cast<std::size_t>(table[run]) * call.block_stride +
               skipped * call.kv_heads * call.head_dim;
    }
};

// Visit a row's runs. `after` says where what is read so many runs after the last one lies.
template <class Element, class After, class Visit>
ALWAYS_INLINE void for_each_run(const DecodeAttention<Element>& call, const Runs<Element>& runs, const Element* layer,
                                std::size_t lead, const After& after, const Visit& visit) {
    std::size_t token = runs.first;
    for (std::size_t run = 0; run < runs.count; ++run) {
        const std::size_t end = std::min(runs.length, (token / call.block_size + 1) * call.block_size);
        const Element* ahead =
            run + lead < runs.count ? runs.at(call, layer, run + lead) : after(run + lead - runs.count);
        visit(Run<Element>{token - runs.first, end - token, runs.at(call, layer, run), ahead});
        token = end;
    }
}

// The softmax of `count` scores, not yet divided by their sum, which is returned. `scores` has room for whole vectors.
ALWAYS_INLINE float soften(float* scores, std::size_t count, float softcap) {
    const std::size_t whole = (count + kLanes - 1) / kLanes * kLanes;
    std::fill(scores + count, scores + whole, -std::numeric_limits<float>::infinity());
    Floats most = Floats{} - std::numeric_limits<float>::infinity();
    for (std::size_t at = 0; at < whole; at += kLanes) {
        Floats x;
        load(scores + at, x);
        if (softcap > 0) {
            const Floats before = x;
            cap(x, softcap);
            x = before == -std::numeric_limits<float>::infinity() ? before : x;
            store(x, scores + at);
        }
        most = x > most ? x : most;
    }
    float lanes[kLanes];
    std::memcpy(lanes, &most, sizeof lanes);
    const float highest = *std::max_element(lanes, lanes + kLanes);
    Floats total{};
    for (std::size_t at = 0; at < whole; at += kLanes) {
        Floats x;
        load(scores + at, x);
        x -= highest;
        exponentiate(x);
        store(x, scores + at);
        if (at + kLanes > count) {
            break;
        }
        total += x;
    }
    float rest = 0;
    for (std::size_t at = count / kLanes * kLanes; at < count; ++at) {
        rest += scores[at];
    }
    return sum(total) + rest;
}

// Scores of a run's tokens for kHeads query heads that share the kv head at `offset`.
template <std::size_t kHeads, class Element>
ALWAYS_INLINE void score(const DecodeAttention<Element>& call, const Run<Element>& run, std::size_t offset,
                         const float* query, float* scores, std::size_t room) {
    const std::size_t token_stride = call.kv_heads * call.head_dim;
    for (std::size_t token = 0; token < run.count; ++token, offset += token_stride) {
        Floats products[kHeads]{};
        for (std::size_t at = 0; at < call.head_dim; at += kLanes) {
            Floats key;
            load(run.at + offset + at, key);
            __builtin_prefetch(run.ahead + offset + at);
            for (std::size_t h = 0; h < kHeads; ++h) {
                Floats q;
                load(query + h * call.head_dim + at, q);
                products[h] += q * key;
            }
        }
        for (std::size_t h = 0; h < kHeads; ++h) {
            scores[h * room + run.token + token] = sum(products[h]);
        }
    }
}

// Add a run's values, weighted, to kVectors of the vectors of kHeads heads that share the kv head at `offset`.
template <std::size_t kHeads, std::size_t kVectors, class Element>
ALWAYS_INLINE void add_vectors(const DecodeAttention<Element>& call, const Run<Element>& run, std::size_t offset,
                               const float* weights, std::size_t room, float* sums) {
    const std::size_t token_stride = call.kv_heads * call.head_dim;
    Floats held[kHeads][kVectors];
    for (std::size_t h = 0; h < kHeads; ++h) {
        for (std::size_t i = 0; i < kVectors; ++i) {
            load(sums + h * call.head_dim + i * kLanes, held[h][i]);
        }
    }
    for (std::size_t token = 0; token < run.count; ++token, offset += token_stride) {
        for (std::size_t i = 0; i < kVectors; ++i) {
            Floats value;
            load(run.at + offset + i * kLanes, value);
            __builtin_prefetch(run.ahead + offset + i * kLanes);
            for (std::size_t h = 0; h < kHeads; ++h) {
                held[h][i] += value * weights[h * room + run.token + token];
            }
        }
    }
    for (std::size_t h = 0; h < kHeads; ++h) {
        for (std::size_t i = 0; i < kVectors; ++i) {
            store(held[h][i], sums + h * call.head_dim + i * kLanes);
        }
    }
}

template <std::size_t kHeads, class Element>
ALWAYS_INLINE void add_values(const DecodeAttention<Element>& call, const Run<Element>& run, std::size_t offset,
                              const float* weights, std::size_t room, float* sums) {
    constexpr std::size_t kTogether = 4;  // with four heads, 16 registers
    std::size_t at = 0;
    for (; at + kTogether * kLanes <= call.head_dim; at += kTogether * kLanes) {
        add_vectors<kHeads, kTogether>(call, run, offset + at, weights, room, sums + at);
    }
    for (; at + 2 * kLanes <= call.head_dim; at += 2 * kLanes) {
        add_vectors<kHeads, 2>(call, run, offset + at, weights, room, sums + at);
    }
    for (; at < call.head_dim; at += kLanes) {
        add_vectors<kHeads, 1>(call, run, offset + at, weights, room, sums + at);
    }
}

// Visit the query heads of one row in groups of up to four that share a kv head.
template <class Element, class Visit>
ALWAYS_INLINE void for_each_group(const DecodeAttention<Element>& call, const Visit& visit) {
    const std::size_t shared = call.heads / call.kv_heads;
    for (std::size_t kv_head = 0; kv_head < call.kv_heads; ++kv_head) {
        std::size_t head = kv_head * shared;
        const std::size_t end = head + shared;
        for (; head + 4 <= end; head += 4) {
            visit(std::integral_constant<std::size_t, 4>{}, head, kv_head);
        }
        for (; head + 2 <= end; head += 2) {
            visit(std::integral_constant<std::size_t, 2>{}, head, kv_head);
        }
        if (head < end) {
            visit(std::integral_constant<std::size_t, 1>{}, head, kv_head);
        }
    }
}

// How many runs ahead to ask for. Memory takes longer than a run of 2 KiB does; four of these take each other's place in the
// nearest cache, where blocks a power of two apart fall together. Two were best on an EPYC core (Zen 4).
template <class Element>
ALWAYS_INLINE std::size_t runs_ahead(const DecodeAttention<Element>& call) {
    constexpr std::size_t kBytes = 4096;
    const std::size_t run_bytes = call.block_size * call.kv_heads * call.head_dim * sizeof(Element);
    return std::max<std::size_t>(1, kBytes / run_bytes);
}

template <class Element>
ALWAYS_INLINE void attend(const DecodeAttention<Element>& call, std::size_t row, std::vector<float>& scratch) {
    const Runs<Element> runs(call, row);
    const Runs<Element> next(call, std::min(row + 1, call.rows - 1));
    const std::size_t lead = runs_ahead(call);
    const std::size_t count = runs.length - runs.first;
    const std::size_t room = (count + kLanes - 1) / kLanes * kLanes;
    const std::size_t width = call.heads * call.head_dim;
    scratch.resize(call.heads * room + 2 * width + call.heads);
    float* scores = scratch.data();  // (heads, room)
    float* query = scores + call.heads * room;
    float* sums = query + width;
    float* totals = sums + width;
    for (std::size_t at = 0; at < width; at += kLanes) {
        Floats x;
        load(call.query + row * width + at, x);
        store(x * call.scale, query + at);
    }

    const auto values_at = [&](std::size_t run) INLINE_LAMBDA { return runs.at(call, call.values, run); };
    for_each_run(call, runs, call.keys, lead, values_at, [&](const Run<Element>& run) INLINE_LAMBDA {
        for_each_group(call, [&](auto heads, std::size_t head, std::size_t kv_head) INLINE_LAMBDA {
            score<heads>(call, run, kv_head * call.head_dim, query + head * call.head_dim, scores + head * room, room);
        });
    });
    for (std::size_t head = 0; head < call.heads; ++head) {
        totals[head] = soften(scores + head * room, count, call.softcap);
    }
    std::fill(sums, sums + width, 0.0F);
    const auto next_keys_at = [&](std::size_t run) INLINE_LAMBDA { return next.at(call, call.keys, run); };
    for_each_run(call, runs, call.values, lead, next_keys_at, [&](const Run<Element>& run) INLINE_LAMBDA {
        for_each_group(call, [&](auto heads, std::size_t head, std::size_t kv_head) INLINE_LAMBDA {
            add_values<heads>(call, run, kv_head * call.head_dim, scores + head * room, room,
                              sums + head * call.head_dim);
        });
    });
    for (std::size_t at = 0; at < width; at += kLanes) {
        Floats x;
        load(sums + at, x);
        store(x / totals[at / call.head_dim], call.out + row * width + at);
    }
}

template <class Element>
ALWAYS_INLINE void attend_all(const DecodeAttention<Element>& call) {
    std::vector<float> scratch;
    for (std::size_t row = 0; row < call.rows; ++row) {
        attend(call, row, scratch);
    }
}

#if defined(__x86_64__)

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,fma")))
#define AVX2 __attribute__((target("avx2,fma")))

AVX512 void attend_avx512(const DecodeAttention<float>& call) { attend_all(call); }
AVX512 void attend_avx512(const DecodeAttention<std::uint16_t>& call) { attend_all(call); }
AVX2 void attend_avx2(const DecodeAttention<float>& call) { attend_all(call); }
AVX2 void attend_avx2(const DecodeAttention<std::uint16_t>& call) { attend_all(call); }

#endif

// Chosen at run time and by hand: `target_clones` needs ifunc, which not every libc has.
template <class Element>
void dispatch(const DecodeAttention<Element>& call) {
#if defined(__x86_64__)
    static const bool avx512 =
        __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    static const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (avx512) {
        return attend_avx512(call);
    }
    if (avx2) {
        return attend_avx2(call);
    }
#endif
    attend_all(call);
}

}  // namespace

void decode_attention(const DecodeAttention<float>& call) { dispatch(call); }
void decode_attention(const DecodeAttention<std::uint16_t>& call) { dispatch(call); }

}  // namespace penstock
