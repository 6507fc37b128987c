// Tokens of streams on their way from a worker's frame to chunks for their clients.
//
// The oracle is the Python reference in src/penstock/runtime/requests/direct_streams.py: equal frames give equal chunks.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace penstock {

// The bytes of a byte-level vocabulary's tokens, asked for when they are first needed.
class TokenTable {
  public:
    using Lookup = std::function<std::string(std::int32_t)>;

    struct Token {
        std::string bytes;
        bool is_known = false;
        bool is_plain = false; // stands in a JSON string as it is
    };

    explicit TokenTable(Lookup lookup) : lookup_(std::move(lookup)) {}
    TokenTable(const TokenTable&) = delete;
    TokenTable& operator=(const TokenTable&) = delete;

    // Valid until the next call.
    const Token& operator[](std::int32_t id);

  private:
    static constexpr std::size_t kPageTokens = 512;
    static constexpr std::size_t kPagesMax = 4096; // ids beyond are looked up each time
    using Page = std::array<Token, kPageTokens>;

    void look_up(std::int32_t id, Token& token) const;

    Lookup lookup_;
    std::vector<std::unique_ptr<Page>> pages_;
    Token other_;
};

// Makes one output's tokens text; an unfinished character is held back.
class ByteDecoder {
  public:
    explicit ByteDecoder(std::shared_ptr<TokenTable> table) : table_(std::move(table)) {}

    void feed(std::span<const std::int32_t> ids, std::string& text);
    void finish(std::string& text);

    // As `feed`, with the text as it stands in a JSON string.
    void feed_json(std::span<const std::int32_t> ids, std::string& json);

  private:
    void gather(std::span<const std::int32_t> ids);
    void decode(bool is_final, std::string& text);

    std::shared_ptr<TokenTable> table_;
    std::string content_; // what is held back, and before decoding also what is new
};

// The rule of one stream, and its counts.
class DirectStream {
  public:
    DirectStream(std::shared_ptr<ByteDecoder> decoder, std::string before, std::string after, bool is_chunked);

    // Count packed tokens; append their chunk, which is nothing while all text is held back. Returns the mean gap between them.
    double write(std::string_view packed, double now_s, std::string& chunk);

    std::uint64_t tokens = 0;
    double last_s = 0.0;
    double sent_s = 0.0;
    double gaps_s = 0.0;

  private:
    std::shared_ptr<ByteDecoder> decoder_;
    std::string before_;
    std::string after_;
    bool is_chunked_;
    std::vector<std::int32_t> ids_;
    std::string json_;
};

// A stream that is open, and what it has got since.
struct OpenStream {
    explicit OpenStream(std::shared_ptr<DirectStream> rule) : stream(std::move(rule)) {}
    virtual ~OpenStream() = default;
    OpenStream(const OpenStream&) = delete;
    OpenStream& operator=(const OpenStream&) = delete;

    std::shared_ptr<DirectStream> stream;
    std::string id;
    std::string written;
    std::string waiting;
    std::uint64_t ungranted = 0;
    std::uint64_t kept_in_frame = 0; // the latest frame with a delta that is not plain
    bool is_open = false;
};

// The open streams of one connection.
class DirectStreams {
  public:
    using Entry = std::shared_ptr<OpenStream>;

    // A plain delta is written as `delta_head`, request id, tokens and `delta_tail`.
    DirectStreams(std::string delta_head, std::string delta_tail)
        : delta_head_(std::move(delta_head)), delta_tail_(std::move(delta_tail)) {}

    std::size_t size() const { return open_.size(); }

    // False if the request is open already.
    bool open(std::string id, Entry entry);

    // Gives null if it is not open.
    Entry close(std::string_view id);

    // Take the plain deltas of open streams out of a frame. Gives the frame without them, empty if nothing is left; nullopt if
    // nothing was taken, also of bytes that are no such frame.
    std::optional<std::string> feed(std::string_view payload);

    // Gives the streams with tokens that wait, which wait no more once their caller has written them.
    std::vector<Entry> take_waiting();

  private:
    struct Hash {
        using is_transparent = void;
        std::size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
    };

    OpenStream* find(std::string_view id) const;

    std::string delta_head_;
    std::string delta_tail_;
    std::unordered_map<std::string, Entry, Hash, std::equal_to<>> open_;
    std::vector<OpenStream*> waiting_;
    std::uint64_t frame_ = 0;
    std::vector<std::pair<OpenStream*, std::string_view>> taken_; // of the present frame
    std::vector<std::string_view> rest_;
};

}  // namespace penstock
