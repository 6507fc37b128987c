// Two ideas make this fast. The tokens of several blocks are absorbed side by side in vector lanes, which needs no
// parent; and the words of the next group are absorbed between the chain steps of this one, so that the vector units
// work while the scalar chain, which is bound by its latency, waits for itself.

#include "hashing.hpp"

#include <bit>
#include <cstring>
#include <vector>

#define ALWAYS_INLINE inline __attribute__((always_inline))

namespace penstock {
namespace {

static_assert(std::endian::native == std::endian::little, "tokens and hashes are hashed as little-endian bytes");

using Word = std::uint64_t;
using Words2 __attribute__((vector_size(16))) = Word;
using Words4 __attribute__((vector_size(32))) = Word;
using Words8 __attribute__((vector_size(64))) = Word;
constexpr std::size_t kTokensPerWord = sizeof(Word) / sizeof(std::int32_t);
constexpr std::size_t kParentBytes = 2 * sizeof(Word);

ALWAYS_INLINE Word load(const void* from) {
    Word word;
    std::memcpy(&word, from, sizeof word);
    return word;
}

// `T` is a word, or a vector of words where several messages are absorbed side by side.
template <class T>
struct State {
    T v0, v1, v2, v3;
};

template <int kBits, class T>
ALWAYS_INLINE void rotate_left(T& x) {
    x = (x << kBits) | (x >> (64 - kBits));
}

template <int kCount, class T>
ALWAYS_INLINE void rounds(State<T>& s) {
    for (int i = 0; i < kCount; ++i) {
        s.v0 += s.v1;
        s.v2 += s.v3;
        rotate_left<13>(s.v1);
        rotate_left<16>(s.v3);
        s.v1 ^= s.v0;
        s.v3 ^= s.v2;
        rotate_left<32>(s.v0);
        s.v2 += s.v1;
        s.v0 += s.v3;
        rotate_left<17>(s.v1);
        rotate_left<21>(s.v3);
        s.v1 ^= s.v2;
        s.v3 ^= s.v0;
        rotate_left<32>(s.v2);
    }
}

template <class T>
ALWAYS_INLINE void absorb(State<T>& s, const T& word) {
    s.v3 ^= word;
    rounds<2>(s);
    s.v0 ^= word;
}

ALWAYS_INLINE State<Word> initial_state(Key key) {
    return {key.k0 ^ 0x736f6d6570736575, key.k1 ^ 0x646f72616e646f6d ^ 0xee, key.k0 ^ 0x6c7967656e657261,
            key.k1 ^ 0x7465646279746573};
}

// Absorb the last word (up to 7 bytes of `rest`, and the length) and give the digest.
ALWAYS_INLINE Hash finish(State<Word> s, Word rest, std::size_t message_bytes) {
    absorb(s, rest | Word{message_bytes} << 56);
    Hash hash;
    s.v2 ^= 0xee;
    rounds<4>(s);
    hash.low = s.v0 ^ s.v1 ^ s.v2 ^ s.v3;
    s.v1 ^= 0xdd;
    rounds<4>(s);
    hash.high = s.v0 ^ s.v1 ^ s.v2 ^ s.v3;
    return hash;
}

// A message that comes in pieces of any length: whole words are absorbed, the rest waits for the next piece.
class Message {
  public:
    // `state` has absorbed `absorbed_bytes` already, a multiple of the word's size.
    Message(const State<Word>& state, std::size_t absorbed_bytes) : state_(state), num_bytes_(absorbed_bytes) {}

    void add(std::span<const std::uint8_t> piece) {
        while (piece.size() >= sizeof(Word)) {
            add_word(load(piece.data()));
            piece = piece.subspan(sizeof(Word));
        }
        for (const std::uint8_t byte : piece) {
            rest_ |= Word{byte} << rest_bits();
            ++num_bytes_;
            if (rest_bits() == 0) {
                absorb(state_, rest_);
                rest_ = 0;
            }
        }
    }

    void add_word(Word word) {
        const int bits = rest_bits();
        absorb(state_, rest_ | word << bits);
        rest_ = bits == 0 ? 0 : word >> (64 - bits);
        num_bytes_ += sizeof(Word);
    }

    Hash digest() const { return finish(state_, rest_, num_bytes_); }

  private:
    int rest_bits() const { return static_cast<int>(num_bytes_ % sizeof(Word)) * 8; }

    State<Word> state_;
    Word rest_ = 0;
    std::size_t num_bytes_;
};

// Walks the blocks in order and chains them, given the states that have absorbed each block's whole words.
class Chain {
  public:
    Chain(std::span<const std::int32_t> tokens, std::size_t block_size, Hash first, std::span<const Extra> extras)
        : tokens_(tokens), block_size_(block_size), parent_(first), extras_(extras) {}

    ALWAYS_INLINE Hash next(State<Word> s, std::size_t block) {
        const bool has_extra = !extras_.empty() && extras_.front().block == block;
        if (has_extra || block_size_ % kTokensPerWord != 0) {
            return next_in_pieces(s, block, has_extra);
        }
        absorb(s, parent_.low);
        absorb(s, parent_.high);
        return parent_ = finish(s, 0, block_size_ * sizeof(std::int32_t) + kParentBytes);
    }

  private:
    __attribute__((noinline)) Hash next_in_pieces(const State<Word>& s, std::size_t block, bool has_extra) {
        const std::size_t odd = block_size_ % kTokensPerWord;
        Message message(s, (block_size_ - odd) * sizeof(std::int32_t));
        const std::int32_t* end = tokens_.data() + (block + 1) * block_size_;
        message.add({reinterpret_cast<const std::uint8_t*>(end - odd), odd * sizeof(std::int32_t)});
        if (has_extra) {
            message.add(extras_.front().bytes);
            extras_ = extras_.subspan(1);
        }
        message.add_word(parent_.low);
        message.add_word(parent_.high);
        return parent_ = message.digest();
    }

    std::span<const std::int32_t> tokens_;
    std::size_t block_size_;
    Hash parent_;
    std::span<const Extra> extras_;
};

// As many consecutive blocks as `Vector` has lanes, absorbed side by side.
template <class Vector>
class Group {
  public:
    static constexpr std::size_t kLanes = sizeof(Vector) / sizeof(Word);

    ALWAYS_INLINE Group(const State<Word>& start, const std::int32_t* tokens, std::size_t block_size)
        : states_{Vector{} + start.v0, Vector{} + start.v1, Vector{} + start.v2, Vector{} + start.v3},
          tokens_(tokens), block_size_(block_size) {}

    // Absorb the words `begin` to `end` of every block.
    ALWAYS_INLINE void absorb_words(std::size_t begin, std::size_t end) {
        for (std::size_t word = begin; word < end; ++word) {
            Vector words;
            load_column(tokens_ + word * kTokensPerWord, words);
            absorb(states_, words);
        }
    }

    // Give the state of each block.
    ALWAYS_INLINE void store(Word (&states)[4][kLanes]) const {
        std::memcpy(states[0], &states_.v0, sizeof(Vector));
        std::memcpy(states[1], &states_.v1, sizeof(Vector));
        std::memcpy(states[2], &states_.v2, sizeof(Vector));
        std::memcpy(states[3], &states_.v3, sizeof(Vector));
    }

  private:
    // One word of each block; written out, as compilers insert one lane at a time where it is a loop.
    ALWAYS_INLINE void load_column(const std::int32_t* at, Vector& words) const {
        const std::size_t step = block_size_;
        if constexpr (kLanes == 8) {
            words = Vector{load(at),            load(at + step),     load(at + 2 * step), load(at + 3 * step),
                           load(at + 4 * step), load(at + 5 * step), load(at + 6 * step), load(at + 7 * step)};
        } else if constexpr (kLanes == 4) {
            words = Vector{load(at), load(at + step), load(at + 2 * step), load(at + 3 * step)};
        } else {
            words = Vector{load(at), load(at + step)};
        }
    }

    State<Vector> states_;
    const std::int32_t* tokens_;
    std::size_t block_size_;
};

template <class Vector>
ALWAYS_INLINE void hash_blocks(std::span<const std::int32_t> tokens, std::size_t block_size, Hash first,
                               std::span<const Extra> extras, Key key, std::span<Hash> out) {
    constexpr std::size_t kLanes = Group<Vector>::kLanes;
    const std::size_t num_words = block_size / kTokensPerWord;
    const std::size_t grouped = out.size() - out.size() % kLanes;
    const State<Word> start = initial_state(key);
    Chain chain(tokens, block_size, first, extras);

    if (grouped > 0) {
        Group<Vector> group(start, tokens.data(), block_size);
        group.absorb_words(0, num_words);
        for (std::size_t block = 0; block < grouped; block += kLanes) {
            Word states[4][kLanes];
            group.store(states);
            const std::size_t next = block + kLanes;
            const std::size_t next_words = next < grouped ? num_words : 0;
            group = Group<Vector>(start, tokens.data() + next * block_size, block_size);
            for (std::size_t lane = 0; lane < kLanes; ++lane) {
                group.absorb_words(next_words * lane / kLanes, next_words * (lane + 1) / kLanes);
                out[block + lane] =
                    chain.next({states[0][lane], states[1][lane], states[2][lane], states[3][lane]}, block + lane);
            }
        }
    }
    for (std::size_t block = grouped; block < out.size(); ++block) {
        State<Word> state = start;
        for (std::size_t word = 0; word < num_words; ++word) {
            absorb(state, load(tokens.data() + block * block_size + word * kTokensPerWord));
        }
        out[block] = chain.next(state, block);
    }
}

#if defined(__x86_64__)

__attribute__((target("avx512f,avx512vl"))) void hash_blocks_avx512(std::span<const std::int32_t> tokens,
                                                                    std::size_t block_size, Hash first,
                                                                    std::span<const Extra> extras, Key key,
                                                                    std::span<Hash> out) {
    hash_blocks<Words8>(tokens, block_size, first, extras, key, out);
}

__attribute__((target("avx2"))) void hash_blocks_avx2(std::span<const std::int32_t> tokens, std::size_t block_size,
                                                      Hash first, std::span<const Extra> extras, Key key,
                                                      std::span<Hash> out) {
    hash_blocks<Words4>(tokens, block_size, first, extras, key, out);
}

#endif

void hash_blocks_portable(std::span<const std::int32_t> tokens, std::size_t block_size, Hash first,
                          std::span<const Extra> extras, Key key, std::span<Hash> out) {
    hash_blocks<Words2>(tokens, block_size, first, extras, key, out);
}

}  // namespace

Hash siphash128(std::span<const std::uint8_t> message, Key key) {
    Message whole(initial_state(key), 0);
    whole.add(message);
    return whole.digest();
}

// Chosen at run time and by hand: `target_clones` needs ifunc, which not every libc has.
std::span<const Implementation> implementations() {
    static const std::vector<Implementation> runnable = [] {
        std::vector<Implementation> found;
#if defined(__x86_64__)
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl")) {
            found.push_back({"avx512", hash_blocks_avx512});
        }
        if (__builtin_cpu_supports("avx2")) {
            found.push_back({"avx2", hash_blocks_avx2});
        }
#endif
        found.push_back({"portable", hash_blocks_portable});
        return found;
    }();
    return runnable;
}

void block_hashes(std::span<const std::int32_t> tokens, std::size_t block_size, Hash first,
                  std::span<const Extra> extras, Key key, std::span<Hash> out) {
    implementations().front().block_hashes(tokens, block_size, first, extras, key, out);
}

}  // namespace penstock
