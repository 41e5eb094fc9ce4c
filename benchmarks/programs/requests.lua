-- Requests of which no two within a few thousand are the same: they differ in their query, in a header and,
-- if the first argument is POST, in their body. wrk formats them before it starts the clock.
local COUNT = 4999
local requests, at = {}, 0

function init(args)
   local method = args[1] or "GET"
   for number = 1, COUNT do
      local body
      local headers = { ["X-Client"] = string.format("%08x", number * 65537) }
      if method == "POST" then
         headers["Content-Type"] = "application/json"
         body = string.format('{"a": %d}', number)
      end
      requests[number] = wrk.format(method, wrk.path .. "?n=" .. number, headers, body)
   end
end

function request()
   at = at % COUNT + 1
   return requests[at]
end
