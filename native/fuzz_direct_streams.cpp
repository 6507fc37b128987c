// Fuzz target: frames of deltas and text, of any bytes, against second implementations and what must hold for all of them.
// With Clang it is a libFuzzer target; elsewhere fuzz_main.cpp feeds it.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <vector>

#include "direct_streams.hpp"
#include "json_text.hpp"
#include "msgpack_reader.hpp"

namespace {

using penstock::DirectStreams;
using penstock::OpenStream;
using namespace std::string_literals;

void expect(bool holds, const char* what) {
    if (!holds) {
        std::fprintf(stderr, "%s differs\n", what);
        std::abort();
    }
}

// Give the length of the character at the start, 0 where it is at fault; by the table of the Unicode standard (3.9, table 3-7).
std::size_t character(std::string_view text) {
    struct Row {
        unsigned first, last, second_first, second_last;
        std::size_t length;
    };
    static constexpr Row kRows[] = {
        {0x00, 0x7F, 0, 0, 1},       {0xC2, 0xDF, 0x80, 0xBF, 2}, {0xE0, 0xE0, 0xA0, 0xBF, 3},
        {0xE1, 0xEC, 0x80, 0xBF, 3}, {0xED, 0xED, 0x80, 0x9F, 3}, {0xEE, 0xEF, 0x80, 0xBF, 3},
        {0xF0, 0xF0, 0x90, 0xBF, 4}, {0xF1, 0xF3, 0x80, 0xBF, 4}, {0xF4, 0xF4, 0x80, 0x8F, 4},
    };
    const auto byte = [&](std::size_t at) { return static_cast<unsigned char>(text[at]); };
    for (const Row& row : kRows) {
        if (byte(0) < row.first || byte(0) > row.last || text.size() < row.length) {
            continue;
        }
        bool fits = row.length == 1 || (byte(1) >= row.second_first && byte(1) <= row.second_last);
        for (std::size_t at = 2; at < row.length; ++at) {
            fits = fits && byte(at) >= 0x80 && byte(at) <= 0xBF;
        }
        return fits ? row.length : 0;
    }
    return 0;
}

// Whatever the cuts, the text is the same, valid, and all that was valid in the bytes.
void compare_text(std::string_view bytes, std::mt19937_64& random) {
    std::string whole;
    expect(penstock::append_utf8(bytes, true, whole) == bytes.size(), "bytes used");
    std::string pieces;
    std::string held;
    for (std::size_t at = 0; at < bytes.size();) {
        const std::size_t size = std::min<std::size_t>(1 + random() % 5, bytes.size() - at);
        held += bytes.substr(at, size);
        at += size;
        held.erase(0, penstock::append_utf8(held, false, pieces));
        expect(held.size() < 4, "bytes held back");
    }
    penstock::append_utf8(held, true, pieces);
    expect(pieces == whole, "text in pieces");

    std::string expected;
    for (std::size_t at = 0; at < bytes.size();) {
        const std::size_t length = character(bytes.substr(at));
        if (length > 0) {
            expected += bytes.substr(at, length);
            at += length;
            continue;
        }
        // As much of a character as could still have become one is one fault.
        std::size_t fault = 1;
        while (fault < 3 && at + fault < bytes.size()) {
            const std::string prefix(bytes.substr(at, fault + 1));
            const bool could = character(prefix + "\x80") > 0 || character(prefix + "\xBF") > 0 ||
                               character(prefix + "\x80\x80") > 0 || character(prefix + "\xBF\xBF") > 0;
            if (!could) {
                break;
            }
            ++fault;
        }
        expected += "\xEF\xBF\xBD";
        at += fault;
    }
    expect(whole == expected, "text");

    std::string json;
    penstock::append_json(whole, json);
    std::string back;
    for (std::size_t at = 0; at < json.size(); ++at) {
        expect(static_cast<unsigned char>(json[at]) >= 0x20 && json[at] != '"', "a character that JSON forbids");
        if (json[at] != '\\') {
            back.push_back(json[at]);
            continue;
        }
        static const std::map<char, char> kShort = {{'"', '"'},  {'\\', '\\'}, {'b', '\b'},
                                                    {'f', '\f'}, {'n', '\n'},  {'r', '\r'}, {'t', '\t'}};
        const char kind = json[++at];
        if (kind == 'u') {
            static const std::map<int, std::string> kLineEnds = {
                {0x85, "\xC2\x85"}, {0x2028, "\xE2\x80\xA8"}, {0x2029, "\xE2\x80\xA9"}};
            const int code = std::stoi(json.substr(at + 1, 4), nullptr, 16);
            back += code < 0x80 ? std::string(1, static_cast<char>(code)) : kLineEnds.at(code);
            at += 4;
        } else {
            back.push_back(kShort.at(kind));
        }
    }
    expect(back == whole, "JSON");
    for (const char* const end : {"\xC2\x85", "\xE2\x80\xA8", "\xE2\x80\xA9"}) {
        expect(json.find(end) == std::string::npos, "a line end as it is");
    }
    expect(penstock::is_plain_json(bytes) == (json == bytes && bytes == whole &&
                                              std::ranges::all_of(bytes, [](char c) { return c >= 0; })),
           "plainness");
}

std::string text_of(std::string_view id) { return static_cast<char>(0xA0 | id.size()) + std::string(id); }

// A frame of deltas: some plain, some not, sometimes with a byte changed or the end missing.
void compare_frames(std::string_view bytes, std::mt19937_64& random) {
    const std::string ids[] = {"a", "b", "c"};
    DirectStreams streams("\x98", "\xC0\xC0\x90\xC0\xC0\xC4\x00"s);
    const auto table = std::make_shared<penstock::TokenTable>([](std::int32_t id) { return std::string(1, static_cast<char>('a' + id % 26)); });
    for (std::size_t i = 0; i < 2; ++i) {
        auto rule = std::make_shared<penstock::DirectStream>(std::make_shared<penstock::ByteDecoder>(table), "", "", false);
        expect(streams.open(ids[i], std::make_shared<OpenStream>(std::move(rule))), "opening");
    }
    const std::size_t count = random() % 6;
    std::string frame = "\x82\xA4type\xA6" "deltas\xA6" "deltas"s + static_cast<char>(0x90 | count);
    std::map<std::string, std::string> expected;
    std::map<std::string, bool> is_kept;
    std::string rest;
    std::size_t num_rest = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const std::string& id = ids[random() % 3];
        const std::string tokens(4 * (1 + random() % 3), static_cast<char>(random() % 100));
        std::string delta = "\x98" + text_of(id) + "\xC4" + static_cast<char>(tokens.size()) + tokens;
        const bool is_plain = random() % 3 > 0;
        delta += is_plain ? "\xC0\xC0\x90\xC0\xC0\xC4\x00"s : "\xA4stop\x05\x91\x93\x01\xCB\x00\x00\x00\x00\x00\x00\x00\x00\x90\x81\xA1x\xC0\xC0\xC4\x00"s;
        frame += delta;
        if (is_plain && id != "c" && !is_kept[id]) {
            expected[id] += tokens;
        } else {
            is_kept[id] = true;
            rest += delta;
            ++num_rest;
        }
    }
    const auto left = streams.feed(frame);
    if (expected.empty()) {
        expect(!left, "a frame without plain deltas");
    } else {
        expect(left.has_value(), "a frame with plain deltas");
        expect(num_rest == 0 ? left->empty() : left->ends_with(rest), "what is left of a frame");
        expect(num_rest == 0 || !streams.feed(*left), "what is left of what is left");
    }
    std::map<std::string, std::string> found;
    for (const auto& entry : streams.take_waiting()) {
        found[entry->id] = entry->waiting;
        entry->waiting.clear();
    }
    expect(found == expected, "tokens");
    if (!frame.empty()) { // broken frames must do no harm
        frame[random() % frame.size()] = static_cast<char>(random());
        streams.feed(frame.substr(0, random() % (frame.size() + 1)));
        streams.feed(frame.substr(0, 21) + std::string(bytes));
    }
    penstock::MsgpackReader reader(bytes);
    while (reader.skip(1)) {
        expect(reader.at() <= bytes.size(), "where a reader is");
    }
    for (const std::string& id : ids) {
        streams.close(id);
    }
    expect(streams.size() == 0 && streams.take_waiting().empty(), "closing");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    std::uint64_t seed = 0;
    std::memcpy(&seed, data, std::min(size, sizeof seed));
    std::mt19937_64 random(seed);
    const std::string_view bytes(reinterpret_cast<const char*>(data), std::min<std::size_t>(size, 400));
    compare_text(bytes, random);
    // Bytes that are mostly characters, and their leads and continuations beside each other.
    std::string likely;
    for (const char byte : bytes) {
        static constexpr std::string_view kPieces[] = {"a", "\xC3\xA9", "\xE2\x82\xAC", "\xF0\x9F\x98\x80", "\xE2\x82", "\xF0\x9F", "\x80", "\xED\xA0", "\"", "\\", "\n", "\x01"};
        likely += kPieces[static_cast<unsigned char>(byte) % std::size(kPieces)];
    }
    compare_text(likely, random);
    compare_frames(bytes, random);
    return 0;
}
