// For each row and kv head: scores of all tokens, their softmax, the weighted sum of values. Up to four query heads
// that share a kv head go together, so that each key and value is loaded once for them.

#include "attention.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
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
    float lanes[kLanes];
    std::memcpy(lanes, &x, sizeof lanes);
    for (std::size_t half = kLanes / 2; half > 0; half /= 2) {
        for (std::size_t i = 0; i < half; ++i) {
            lanes[i] += lanes[i + half];
        }
    }
    return lanes[0];
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

// One row's tokens [first, length), block by block.
template <class Element, class Visit>
ALWAYS_INLINE void for_each_token(const DecodeAttention<Element>& call, std::size_t row, const Element* layer,
                                  std::size_t first, std::size_t length, const Visit& visit) {
    const std::size_t token_stride = call.kv_heads * call.head_dim;
    const std::int32_t* table = call.tables + row * call.table_width;
    std::size_t token = first;
    while (token < length) {
        const std::size_t block = token / call.block_size;
        const std::size_t end = std::min(length, (block + 1) * call.block_size);
        const Element* at = layer + static_cast<std::size_t>(table[block]) * call.block_stride +
                            (token - block * call.block_size) * token_stride;
        for (; token < end; ++token, at += token_stride) {
            visit(token - first, at);
        }
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

// Query heads [head, head + kHeads) of one row; they share a kv head.
template <std::size_t kHeads, class Element>
ALWAYS_INLINE void attend(const DecodeAttention<Element>& call, std::size_t row, std::size_t head,
                          std::vector<float>& scratch) {
    const std::size_t vectors = call.head_dim / kLanes;
    const std::size_t length = static_cast<std::size_t>(call.lengths[row]);
    const std::size_t first = call.window > 0 && length > call.window ? length - call.window : 0;
    const std::size_t room = (length - first + kLanes - 1) / kLanes * kLanes;
    scratch.resize(kHeads * (room + call.head_dim));
    float* scores = scratch.data();
    float* query = scores + kHeads * room;
    const std::size_t kv_offset = head / (call.heads / call.kv_heads) * call.head_dim;
    const std::size_t query_offset = (row * call.heads + head) * call.head_dim;

    for (std::size_t at = 0; at < kHeads * call.head_dim; at += kLanes) {
        Floats x;
        load(call.query + query_offset + at, x);
        x *= call.scale;
        store(x, query + at);
    }
    for_each_token(call, row, call.keys + kv_offset, first, length, [&](std::size_t token, const Element* key) INLINE_LAMBDA {
        Floats products[kHeads]{};
        for (std::size_t vector = 0; vector < vectors; ++vector) {
            Floats k;
            load(key + vector * kLanes, k);
            for (std::size_t h = 0; h < kHeads; ++h) {
                Floats q;
                load(query + h * call.head_dim + vector * kLanes, q);
                products[h] += q * k;
            }
        }
        for (std::size_t h = 0; h < kHeads; ++h) {
            scores[h * room + token] = sum(products[h]);
        }
    });
    float share[kHeads];
    for (std::size_t h = 0; h < kHeads; ++h) {
        share[h] = 1.0F / soften(scores + h * room, length - first, call.softcap);
    }
    constexpr std::size_t kTogether = 4;  // vectors of the head summed in one walk: with four heads, 16 registers
    for (std::size_t start = 0; start < vectors; start += kTogether) {
        const std::size_t width = std::min(kTogether, vectors - start);
        Floats sums[kHeads][kTogether]{};
        const auto add = [&](std::size_t token, const Element* value, std::size_t count) INLINE_LAMBDA {
            for (std::size_t vector = 0; vector < count; ++vector) {
                Floats v;
                load(value + vector * kLanes, v);
                for (std::size_t h = 0; h < kHeads; ++h) {
                    sums[h][vector] += v * scores[h * room + token];
                }
            }
        };
        const Element* values = call.values + kv_offset + start * kLanes;
        if (width == kTogether) {  // a constant count keeps the sums in registers
            for_each_token(call, row, values, first, length,
                           [&](std::size_t token, const Element* value) INLINE_LAMBDA { add(token, value, kTogether); });
        } else {
            for_each_token(call, row, values, first, length,
                           [&](std::size_t token, const Element* value) INLINE_LAMBDA { add(token, value, width); });
        }
        for (std::size_t h = 0; h < kHeads; ++h) {
            for (std::size_t vector = 0; vector < width; ++vector) {
                store(sums[h][vector] * share[h],
                      call.out + query_offset + h * call.head_dim + (start + vector) * kLanes);
            }
        }
    }
}

template <class Element>
ALWAYS_INLINE void attend_all(const DecodeAttention<Element>& call) {
    std::vector<float> scratch;
    const std::size_t shared = call.heads / call.kv_heads;
    for (std::size_t row = 0; row < call.rows; ++row) {
        for (std::size_t group = 0; group < call.heads; group += shared) {
            std::size_t head = group;
            for (; head + 4 <= group + shared; head += 4) {
                attend<4>(call, row, head, scratch);
            }
            for (; head + 2 <= group + shared; head += 2) {
                attend<2>(call, row, head, scratch);
            }
            if (head < group + shared) {
                attend<1>(call, row, head, scratch);
            }
        }
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
