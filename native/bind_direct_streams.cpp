// The classes penstock._native.TokenTable, ByteDecoder, DirectStream and DirectStreams.

#include <nanobind/nanobind.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include "direct_streams.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace penstock {
namespace {

// A stream with what its client is called by: a `DirectClient` of src/penstock/seams/dispatch.py.
struct BoundStream final : OpenStream {
    BoundStream(std::shared_ptr<DirectStream> rule, nb::handle client)
        : OpenStream(std::move(rule)), write(client.attr("transport").attr("write")),
          is_closing(client.attr("transport").attr("is_closing")),
          buffer_size(client.attr("transport").attr("get_write_buffer_size")), passed(client.attr("passed")),
          interrupted(client.attr("interrupted")), buffer_bytes(nb::cast<std::uint64_t>(client.attr("buffer_bytes"))) {}

    nb::object write;
    nb::object is_closing;
    nb::object buffer_size;
    nb::object passed;
    nb::object interrupted;
    std::uint64_t buffer_bytes;
};

// One stream's part of a flush.
struct Flushed {
    DirectStreams::Entry entry;
    nb::object chunk; // null while all text is held back
    double gap_s;
    bool is_gone;

    BoundStream& stream() const { return static_cast<BoundStream&>(*entry); }
};

std::string_view view(const nb::bytes& bytes) { return {static_cast<const char*>(bytes.data()), bytes.size()}; }

nb::bytes as_bytes(std::string_view text) { return nb::bytes(text.data(), text.size()); }

nb::object as_text(const std::string& text) {
    return nb::steal(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "strict"));
}

std::shared_ptr<TokenTable> make_table(nb::callable lookup) {
    return std::make_shared<TokenTable>([lookup = std::move(lookup)](std::int32_t id) {
        return std::string(view(nb::cast<nb::bytes>(lookup(id))));
    });
}

nb::object feed_decoder(ByteDecoder& decoder, nb::handle token_ids) {
    std::vector<std::int32_t> ids;
    for (const nb::handle id : nb::iter(token_ids)) {
        ids.push_back(nb::cast<std::int32_t>(id));
    }
    std::string text;
    decoder.feed(ids, text);
    return as_text(text);
}

nb::object finish_decoder(ByteDecoder& decoder) {
    std::string text;
    decoder.finish(text);
    return as_text(text);
}

class BoundStreams {
  public:
    BoundStreams(std::uint64_t grant_tokens, const nb::bytes& delta_head, const nb::bytes& delta_tail)
        : streams_(std::string(view(delta_head)), std::string(view(delta_tail))), grant_tokens_(grant_tokens) {}

    std::size_t size() const { return streams_.size(); }

    void open(std::string id, std::shared_ptr<DirectStream> stream, nb::handle client) {
        const std::string name = id;
        if (!streams_.open(std::move(id), std::make_shared<BoundStream>(std::move(stream), client))) {
            throw nb::value_error((name + ": open already").c_str());
        }
    }

    nb::object close(std::string_view id) {
        const auto entry = streams_.close(id);
        if (!entry) {
            return nb::none();
        }
        return nb::make_tuple(as_bytes(entry->written), as_bytes(entry->waiting), entry->ungranted);
    }

    nb::object feed(const nb::bytes& payload) {
        const auto rest = streams_.feed(view(payload));
        return rest ? nb::object(as_bytes(*rest)) : nb::none();
    }

    // All is written before anything else is called: a client that the first chunk wakes finds the others there. What is called
    // may close any stream, so the table is not looked at meanwhile. The first exception is returned beside the others' grants.
    nb::object flush(double now_s) {
        std::uint64_t tokens = 0;
        nb::list grants;
        std::vector<Flushed> all;
        for (auto& entry : streams_.take_waiting()) {
            const std::uint64_t count = entry->waiting.size() / sizeof(std::int32_t);
            std::string chunk;
            const double gap_s = entry->stream->write(entry->waiting, now_s, chunk);
            entry->written += entry->waiting;
            entry->waiting.clear();
            tokens += count;
            entry->ungranted += count;
            if (entry->ungranted >= grant_tokens_) {
                grants.append(nb::make_tuple(nb::str(entry->id.data(), entry->id.size()), entry->ungranted));
                entry->ungranted = 0;
            }
            all.push_back({std::move(entry), chunk.empty() ? nb::object() : as_bytes(chunk), gap_s, false});
        }
        nb::object failure = nb::none();
        for (Flushed& flushed : all) {
            try {
                write(flushed);
            } catch (nb::python_error& error) {
                failure = failure.is_none() ? nb::borrow(error.value()) : failure;
            }
        }
        for (const Flushed& flushed : all) {
            try {
                tell(flushed);
            } catch (nb::python_error& error) {
                failure = failure.is_none() ? nb::borrow(error.value()) : failure;
            }
        }
        return nb::make_tuple(tokens, grants, failure);
    }

  private:
    static void write(Flushed& flushed) {
        if (flushed.chunk.is_valid()) {
            flushed.is_gone = nb::cast<bool>(flushed.stream().is_closing());
            if (!flushed.is_gone) {
                flushed.stream().write(flushed.chunk);
            }
        }
    }

    static void tell(const Flushed& flushed) {
        BoundStream& stream = flushed.stream();
        stream.passed(flushed.gap_s);
        if (flushed.is_gone || (flushed.chunk.is_valid() &&
                                nb::cast<std::uint64_t>(stream.buffer_size()) > stream.buffer_bytes)) {
            stream.interrupted(flushed.is_gone);
        }
    }

    DirectStreams streams_;
    std::uint64_t grant_tokens_;
};

std::shared_ptr<DirectStream> make_stream(std::shared_ptr<ByteDecoder> decoder, const nb::bytes& before,
                                          const nb::bytes& after, bool is_chunked) {
    return std::make_shared<DirectStream>(std::move(decoder), std::string(view(before)), std::string(view(after)),
                                          is_chunked);
}

nb::tuple chunk(DirectStream& stream, const nb::bytes& packed, double now_s) {
    std::string text;
    const double gap_s = stream.write(view(packed), now_s, text);
    return nb::make_tuple(as_bytes(text), gap_s);
}

}  // namespace

void bind_direct_streams(nb::module_& module);

void bind_direct_streams(nb::module_& module) {
    nb::class_<TokenTable>(module, "TokenTable").def(nb::new_(&make_table), "lookup"_a);
    nb::class_<ByteDecoder>(module, "ByteDecoder")
        .def(nb::init<std::shared_ptr<TokenTable>>(), "table"_a)
        .def("feed", &feed_decoder, "token_ids"_a)
        .def("finish", &finish_decoder);
    nb::class_<DirectStream>(module, "DirectStream")
        .def(nb::new_(&make_stream), "decoder"_a, "before"_a, "after"_a, nb::kw_only(), "is_chunked"_a)
        .def("chunk", &chunk, "packed"_a, "now_s"_a)
        .def_ro("tokens", &DirectStream::tokens)
        .def_rw("last_s", &DirectStream::last_s)
        .def_ro("sent_s", &DirectStream::sent_s)
        .def_ro("gaps_s", &DirectStream::gaps_s);
    nb::class_<BoundStreams>(module, "DirectStreams")
        .def(nb::init<std::uint64_t, const nb::bytes&, const nb::bytes&>(), "grant_tokens"_a, "delta_head"_a, "delta_tail"_a)
        .def("__len__", &BoundStreams::size)
        .def("open", &BoundStreams::open, "request_id"_a, "stream"_a, "client"_a)
        .def("close", &BoundStreams::close, "request_id"_a)
        .def("feed", &BoundStreams::feed, "payload"_a)
        .def("flush", &BoundStreams::flush, "now_s"_a);
}

}  // namespace penstock
